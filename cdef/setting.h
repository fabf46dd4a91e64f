/* setting.h - every STRATAMPI_* environment variable: one table, read once, typed, with unit and default.
 *
 * The table itself is in native/base/setting.c; the numbers below index it. */

enum smpi_setting {
    SMPI_SET_FABRIC,          /* STRATAMPI_FABRIC: auto | memfd | window | none */
    SMPI_SET_SUPERNODE_SIZE,  /* STRATAMPI_SUPERNODE_SIZE: ranks per supernode, 0 = all that share memory */
    SMPI_SET_HEAP_MAX,        /* STRATAMPI_HEAP_MAX: bytes a rank's heap may hand out, 0 = what the machine has */
    SMPI_SET_WINDOW_SIZE,     /* STRATAMPI_WINDOW_SIZE: bytes of one rank's segment under the driver window */
    SMPI_SET_REGISTER_MIN,    /* STRATAMPI_REGISTER_MIN: NumPy arrays of at least this many bytes go to the heap */
    SMPI_SET_SPIN,            /* STRATAMPI_SPIN: microseconds to spin before sleeping, -1 = choose by cores and ranks */
    SMPI_SET_STREAM_MIN,      /* STRATAMPI_STREAM_MIN: working set in bytes from which non-temporal stores are used, -1: cache */
    SMPI_SET_STAGE_CHUNK,     /* STRATAMPI_STAGE_CHUNK: most bytes of one round on the staged path */
    SMPI_SET_HUGE_AFTER,      /* STRATAMPI_HUGE_AFTER: operators after which memory is gathered in huge pages, 0 = never */
    SMPI_SET_KERNELS,         /* STRATAMPI_KERNELS: auto | base | avx2 | avx512 */
    SMPI_SET_LOG,             /* STRATAMPI_LOG: warn | info | none */
    SMPI_SET_COUNT
};

/* Variable name, one-line help, unit ("bytes", "us", "ranks", "uses", "name"), default as text. NULL when out of range. Static
 * storage. */
const char *smpi_setting_name(int setting);
const char *smpi_setting_help(int setting);
const char *smpi_setting_unit(int setting);
const char *smpi_setting_default(int setting);

/* The value as text: what the environment says, else the default. Never NULL in range. */
const char *smpi_setting_text(int setting);

/* The value of a numeric setting; sizes accept the suffixes K, M, G, T (powers of 1024). A text that is no number gives the
 * default; smpi_setting_invalid() then says so (1), for the doctor and for one warning at start. */
int64_t smpi_setting_number(int setting);
int smpi_setting_invalid(int setting);
