/* setting.c - the table of every STRATAMPI_* variable.
 *
 * The environment is copied once, under pthread_once, the first time anybody asks: getenv races with setenv, and a
 * setting that changes in mid-run would let the ranks' paths drift apart. A text that does not fit its kind never stops
 * a program; the default is used and smpi_setting_invalid() tells, so that the caller can warn once. */
#include "error.h"

#include <ctype.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum kind { NUMBER, NAME };

struct row {
    const char *name;
    enum kind kind;
    const char *unit;
    const char *standard;
    int64_t minimum;     /* NUMBER */
    const char *choices; /* NAME: the legal texts, separated by spaces */
    const char *help;
};

static const struct row table[SMPI_SET_COUNT] = {
    [SMPI_SET_FABRIC] = {"STRATAMPI_FABRIC", NAME, "name", "auto", 0, "auto memfd window none",
                         "how ranks map each other's memory: auto, memfd, window, or none (everything through MPI)"},
    [SMPI_SET_SUPERNODE_SIZE] = {"STRATAMPI_SUPERNODE_SIZE", NUMBER, "ranks", "0", 0, NULL,
                                 "ranks per supernode; 0 = all ranks that share memory"},
    [SMPI_SET_HEAP_MAX] = {"STRATAMPI_HEAP_MAX", NUMBER, "bytes", "0", 0, NULL,
                           "bytes one rank's heap may hand out; 0 = what the machine has"},
    [SMPI_SET_WINDOW_SIZE] = {"STRATAMPI_WINDOW_SIZE", NUMBER, "bytes", "256M", 1, NULL,
                              "bytes of one rank's segment under the driver window"},
    [SMPI_SET_REGISTER_MIN] = {"STRATAMPI_REGISTER_MIN", NUMBER, "bytes", "8K", 0, NULL,
                               "NumPy arrays of at least this size are placed in the heap"},
    [SMPI_SET_SPIN] = {"STRATAMPI_SPIN", NUMBER, "us", "-1", -1, NULL,
                       "how long a waiting rank spins before it sleeps; -1 = chosen by cores and ranks"},
    [SMPI_SET_STREAM_MIN] =
        {"STRATAMPI_STREAM_MIN", NUMBER, "bytes", "-1", -1, NULL,
         "working set from which non-temporal stores are used; -1 = by the size of the last-level cache"},
    [SMPI_SET_STAGE_CHUNK] = {"STRATAMPI_STAGE_CHUNK", NUMBER, "bytes", "1M", 1, NULL,
                              "longest round of the staged path; a communicator that uses it holds four"},
    [SMPI_SET_HUGE_AFTER] =
        {"STRATAMPI_HUGE_AFTER", NUMBER, "uses", "4", 0, NULL,
         "operators that registered memory takes part in before it is gathered in huge pages; 0 = never"},
    [SMPI_SET_KERNELS] = {"STRATAMPI_KERNELS", NAME, "name", "auto", 0, "auto base avx2 avx512",
                          "instruction set of the copy and reduction kernels: auto, base, avx2 or avx512"},
    [SMPI_SET_LOG] = {"STRATAMPI_LOG", NAME, "name", "warn", 0, "warn info none",
                      "what is written to stderr: warn, info (also what was chosen and why) or none"},
};

static struct {
    const char *text; /* a legal value always: the environment's, else the default */
    int64_t number;
    int invalid;
} values[SMPI_SET_COUNT];

static pthread_once_t once = PTHREAD_ONCE_INIT;

/* "-1", "64", "8K", "256 MiB", "1tb": powers of 1024. 1 and *number when all of text was understood and fits. */
static int parse_number(const char *text, int64_t *number)
{
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (end == text || errno != 0)
        return 0;
    while (*end == ' ')
        end++;
    int shift = 0;
    switch (toupper((unsigned char)*end)) {
    case 'K': shift = 10; break;
    case 'M': shift = 20; break;
    case 'G': shift = 30; break;
    case 'T': shift = 40; break;
    default: break;
    }
    if (shift != 0) {
        end++;
        if (tolower((unsigned char)*end) == 'i' && tolower((unsigned char)end[1]) == 'b')
            end++;
    }
    if (tolower((unsigned char)*end) == 'b')
        end++;
    while (isspace((unsigned char)*end))
        end++;
    if (*end != '\0' || value > INT64_MAX >> shift || value < INT64_MIN >> shift)
        return 0;
    *number = (int64_t)value * ((int64_t)1 << shift);
    return 1;
}

static int is_choice(const char *choices, const char *text)
{
    size_t length = strcspn(text, " ");
    if (length == 0 || text[length] != '\0')
        return 0;
    for (const char *at = choices; at != NULL; at = strchr(at, ' ')) {
        at += *at == ' ';
        if (strncmp(at, text, length) == 0 && (at[length] == ' ' || at[length] == '\0'))
            return 1;
    }
    return 0;
}

static int take(const struct row *row, const char *text, int64_t *number)
{
    if (row->kind == NAME) {
        *number = 0;
        return is_choice(row->choices, text);
    }
    int64_t value;
    if (!parse_number(text, &value) || value < row->minimum)
        return 0;
    *number = value;
    return 1;
}

static void read_environment(void)
{
    for (int i = 0; i < SMPI_SET_COUNT; i++) {
        const struct row *row = &table[i];
        values[i].text = row->standard;
        (void)take(row, row->standard, &values[i].number);
        const char *said = getenv(row->name);
        if (said == NULL || *said == '\0')
            continue;
        char *copy = strdup(said); /* lives as long as the process: the environment may change under us */
        int64_t number;
        if (copy != NULL && take(row, copy, &number)) {
            values[i].text = copy;
            values[i].number = number;
        } else {
            values[i].invalid = 1;
            free(copy);
        }
    }
}

static int in_range(int setting)
{
    return setting >= 0 && setting < SMPI_SET_COUNT;
}

const char *smpi_setting_name(int setting)
{
    return in_range(setting) ? table[setting].name : NULL;
}

const char *smpi_setting_help(int setting)
{
    return in_range(setting) ? table[setting].help : NULL;
}

const char *smpi_setting_unit(int setting)
{
    return in_range(setting) ? table[setting].unit : NULL;
}

const char *smpi_setting_default(int setting)
{
    return in_range(setting) ? table[setting].standard : NULL;
}

const char *smpi_setting_text(int setting)
{
    if (!in_range(setting))
        return NULL;
    pthread_once(&once, read_environment);
    return values[setting].text;
}

int64_t smpi_setting_number(int setting)
{
    if (!in_range(setting))
        return 0;
    pthread_once(&once, read_environment);
    return values[setting].number;
}

int smpi_setting_invalid(int setting)
{
    if (!in_range(setting))
        return 0;
    pthread_once(&once, read_environment);
    return values[setting].invalid;
}
