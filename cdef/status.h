/* status.h - what every call of the runtime returns.
 *
 * 0 is success, a negative value an error; a positive one is neither: what was asked for is to be done another way. The first place
 * that knows why an error happened writes one line into a thread-local reason; everybody above passes the status on. Outputs are
 * written on success only. */

enum smpi_status {
    SMPI_OK = 0,
    SMPI_MPI = 1,           /* agreed by all ranks of the communicator: call mpi4py's own method now */
    SMPI_AGAIN = 3,         /* not complete yet (request.h) */
    SMPI_PARSE = 2,         /* not a case for the short way (array.h); nothing was touched */
    SMPI_ERR_NOMEM = -1,    /* the heap or the system has no memory left */
    SMPI_ERR_ARG = -2,      /* an argument is out of its documented range; nothing was touched */
    SMPI_ERR_SYS = -3,      /* a system call failed; the reason names it and errno */
    SMPI_ERR_REFUSED = -4,  /* this system does not offer what was asked for (memfd, descriptor passing, address range) */
    SMPI_ERR_TIMEOUT = -5,  /* a peer did not answer in time */
    SMPI_ERR_MISMATCH = -6, /* the ranks' arguments do not fit together; raised on all of them, communicator still usable */
    SMPI_ERR_INTERRUPTED = -7, /* the wait hook asked to stop (Ctrl-C); the communicator is revoked */
    SMPI_ERR_REVOKED = -8,  /* an earlier operator of this communicator was given up in mid-operation, here or on a peer */
    SMPI_ERR_ALIAS = -9,    /* some rank's send and receive buffers overlap; raised on all ranks, communicator still usable */
};

/* Name of a status ("SMPI_ERR_NOMEM"), "unknown status" for a value that is none. Static storage. */
const char *smpi_status_name(int status);

/* The calling thread's last reason, one line without newline, "" if there was none. Valid until the thread's next failing call. */
const char *smpi_reason(void);
