/* test_setting.c - the table of settings. The environment is read once per process, so every case is a child of its
 * own. */
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "stratampi.h"

struct expected {
    int setting;
    const char *said; /* NULL: unset */
    const char *text;
    int64_t number;
    int invalid;
};

/* Exit code of a child that reads one setting: 0 as expected, 1 not. */
static int run_case(const struct expected *expected)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        atomic_store(&check_failures, 0);
        const char *name = smpi_setting_name(expected->setting);
        if (expected->said != NULL)
            setenv(name, expected->said, 1);
        else
            unsetenv(name);
        CHECK_STR(smpi_setting_text(expected->setting), expected->text);
        CHECK_EQ(smpi_setting_number(expected->setting), expected->number);
        CHECK_EQ(smpi_setting_invalid(expected->setting), expected->invalid);
        _exit(atomic_load(&check_failures) != 0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void test_defaults(void)
{
    static const struct expected cases[] = {
        {SMPI_SET_FABRIC, NULL, "auto", 0, 0},
        {SMPI_SET_SUPERNODE_SIZE, NULL, "0", 0, 0},
        {SMPI_SET_HEAP_MAX, NULL, "0", 0, 0},
        {SMPI_SET_WINDOW_SIZE, NULL, "256M", 256 << 20, 0},
        {SMPI_SET_REGISTER_MIN, NULL, "8K", 8192, 0},
        {SMPI_SET_SPIN, NULL, "-1", -1, 0},
        {SMPI_SET_STREAM_MIN, NULL, "-1", -1, 0},
        {SMPI_SET_STAGE_CHUNK, NULL, "1M", 1048576, 0},
        {SMPI_SET_KERNELS, NULL, "auto", 0, 0},
        {SMPI_SET_LOG, NULL, "warn", 0, 0},
        {SMPI_SET_WINDOW_SIZE, "", "256M", 256 << 20, 0}, /* empty is unset */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK_STR(smpi_setting_default(cases[i].setting), cases[i].text);
        CHECK_EQ(run_case(&cases[i]), 0);
    }
}

static void test_numbers(void)
{
    static const struct expected cases[] = {
        {SMPI_SET_HEAP_MAX, "1", "1", 1, 0},
        {SMPI_SET_HEAP_MAX, "3k", "3k", 3 << 10, 0},
        {SMPI_SET_HEAP_MAX, "5M", "5M", 5 << 20, 0},
        {SMPI_SET_HEAP_MAX, "7 GiB", "7 GiB", 7ll << 30, 0},
        {SMPI_SET_HEAP_MAX, "2tb", "2tb", 2ll << 40, 0},
        {SMPI_SET_HEAP_MAX, "100B", "100B", 100, 0},
        {SMPI_SET_HEAP_MAX, "8388607T", "8388607T", 8388607ll << 40, 0},
        {SMPI_SET_SPIN, "0", "0", 0, 0},
        {SMPI_SET_SPIN, "-1", "-1", -1, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        CHECK_EQ(run_case(&cases[i]), 0);
}

static void test_nonsense_gives_the_default(void)
{
    static const struct expected cases[] = {
        {SMPI_SET_WINDOW_SIZE, "lots", "256M", 256 << 20, 1},
        {SMPI_SET_WINDOW_SIZE, "12X", "256M", 256 << 20, 1},
        {SMPI_SET_WINDOW_SIZE, "0", "256M", 256 << 20, 1},
        {SMPI_SET_WINDOW_SIZE, "K", "256M", 256 << 20, 1},
        {SMPI_SET_WINDOW_SIZE, "1Ki", "256M", 256 << 20, 1},
        {SMPI_SET_WINDOW_SIZE, "4 4", "256M", 256 << 20, 1},
        {SMPI_SET_HEAP_MAX, "8388608T", "0", 0, 1},
        {SMPI_SET_HEAP_MAX, "99999999999999999999", "0", 0, 1},
        {SMPI_SET_SUPERNODE_SIZE, "-2", "0", 0, 1},
        {SMPI_SET_SPIN, "-2", "-1", -1, 1},
        {SMPI_SET_FABRIC, "mem", "auto", 0, 1},
        {SMPI_SET_FABRIC, "auto memfd", "auto", 0, 1},
        {SMPI_SET_FABRIC, " ", "auto", 0, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        CHECK_EQ(run_case(&cases[i]), 0);
}

static void test_names(void)
{
    static const struct expected cases[] = {
        {SMPI_SET_FABRIC, "none", "none", 0, 0},     {SMPI_SET_FABRIC, "memfd", "memfd", 0, 0},
        {SMPI_SET_FABRIC, "window", "window", 0, 0}, {SMPI_SET_KERNELS, "avx512", "avx512", 0, 0},
        {SMPI_SET_KERNELS, "avx2", "avx2", 0, 0},    {SMPI_SET_LOG, "info", "info", 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        CHECK_EQ(run_case(&cases[i]), 0);
}

static void test_every_row_is_complete(void)
{
    for (int i = 0; i < SMPI_SET_COUNT; i++) {
        CHECK(strncmp(smpi_setting_name(i), "STRATAMPI_", 10) == 0);
        CHECK(strlen(smpi_setting_help(i)) > 10);
        CHECK(strlen(smpi_setting_unit(i)) > 0);
        CHECK(strlen(smpi_setting_default(i)) > 0);
    }
    for (int outside = -1; outside <= SMPI_SET_COUNT; outside += SMPI_SET_COUNT + 1) {
        CHECK(smpi_setting_name(outside) == NULL);
        CHECK(smpi_setting_text(outside) == NULL);
        CHECK_EQ(smpi_setting_number(outside), 0);
        CHECK_EQ(smpi_setting_invalid(outside), 0);
    }
}

static void *read_one(void *setting)
{
    return (void *)(intptr_t)smpi_setting_number(*(int *)setting);
}

/* All threads see one value, and a change of the environment afterwards is not seen. */
static void test_read_once(void)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        atomic_store(&check_failures, 0);
        setenv("STRATAMPI_STAGE_CHUNK", "12K", 1);
        int setting = SMPI_SET_STAGE_CHUNK;
        pthread_t threads[4];
        for (int i = 0; i < 4; i++)
            REQUIRE(pthread_create(&threads[i], NULL, read_one, &setting) == 0);
        for (int i = 0; i < 4; i++) {
            void *value = NULL;
            pthread_join(threads[i], &value);
            CHECK_EQ((intptr_t)value, 12 << 10);
        }
        setenv("STRATAMPI_STAGE_CHUNK", "13K", 1);
        CHECK_EQ(smpi_setting_number(setting), 12 << 10);
        _exit(atomic_load(&check_failures) != 0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(void)
{
    for (int i = 0; i < SMPI_SET_COUNT; i++)
        unsetenv(smpi_setting_name(i));
    CHECK_RUN(test_defaults);
    CHECK_RUN(test_numbers);
    CHECK_RUN(test_nonsense_gives_the_default);
    CHECK_RUN(test_names);
    CHECK_RUN(test_every_row_is_complete);
    CHECK_RUN(test_read_once);
    return check_result();
}
