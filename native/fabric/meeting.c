/* meeting.c - how the descriptors of the driver memfd come round: everybody sends and listens, nobody is trusted.
 *
 *   rank 0 --- connect, {magic, token, 0}, descriptor ---> rank 1's socket       each pair meets twice, once in each
 *   rank 0's socket <--- {magic, token, 1}, descriptor --- rank 1                direction; nobody answers anybody
 *
 * The sockets live in the abstract namespace, where anybody on the machine may connect. So each side asks the kernel
 * for the other's uid before it trusts it (the sender before it lets token and descriptor out of its hands), and a
 * connection that does not bring one well-formed message with one descriptor of a sealed file of our size is closed and
 * forgotten; it can delay nobody, because every connection is polled. A sender does not wait for an answer: what it
 * sent stays in the kernel until the peer takes it.
 *
 * Not done: /proc/<pid>/fd or pidfd_getfd, which need ptrace rights that containers withhold. */
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "../base/error.h"
#include "memfd.h"

enum {
    NAME_BYTES = 64, /* of one socket name, as cdef/world.h fixes it */
    TOKEN_BYTES = 16,
    STRANGERS = 64,        /* connections held open beyond one per rank; then the oldest must go */
    MAX_DESCRIPTORS = 253, /* SCM_MAX_FD: the kernel passes no more in one message */
    RETRY_MS = 2,          /* pause before connecting again to a peer whose queue was full */
};

/* The one message. Both ends are the same program on the same machine, so the layout needs no more care than this. */
struct hello {
    char magic[8];
    char token[TOKEN_BYTES];
    int32_t rank;
    int32_t size;
};

static const char magic[8] = "smpi-fd1";

static int64_t now_ms(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

static socklen_t abstract_address(struct sockaddr_un *address, const char *name)
{
    size_t length = strnlen(name, NAME_BYTES - 1);
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    memcpy(address->sun_path + 1, name, length); /* sun_path[0] is NUL: the abstract namespace */
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length);
}

/* The uid at the other end of a connected socket. */
static int peer_uid(int connection, uid_t *uid)
{
    struct ucred credentials;
    socklen_t length = sizeof credentials;
    if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0 || length != sizeof credentials)
        return 0;
    *uid = credentials.uid;
    return 1;
}

int smpi_memfd_listen(smpi_world *world, char *name)
{
    struct smpi_memfd *memfd = smpi_memfd_state(world);
    if (memfd == NULL)
        return SMPI_ERR_NOMEM;
    if (memfd->listener >= 0)
        return smpi_fail(SMPI_ERR_ARG, "this world listens already");
    uint64_t random[2];
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        return smpi_fail(smpi_system_status(errno), "getrandom: %s", strerror(errno));
    char text[NAME_BYTES] = {0};
    snprintf(text, sizeof text, "stratampi-%016llx%016llx", (unsigned long long)random[0],
             (unsigned long long)random[1]);

    int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listener < 0)
        return smpi_fail(smpi_system_status(errno), "socket(AF_UNIX, SOCK_SEQPACKET): %s", strerror(errno));
    struct sockaddr_un address;
    socklen_t length = abstract_address(&address, text);
    if (bind(listener, (struct sockaddr *)&address, length) != 0 || listen(listener, world->size + STRANGERS) != 0) {
        int status =
            smpi_fail(smpi_system_status(errno), "bind or listen on an abstract unix socket: %s", strerror(errno));
        close(listener);
        return status;
    }
    memfd->listener = listener;
    memcpy(name, text, NAME_BYTES);
    return SMPI_OK;
}

/* ---- sending ---- */

enum delivery { DELIVERED, LATER, NEVER };

/* Hands our descriptor to the socket `name`. NEVER: the thread's reason says why. */
static enum delivery deliver(const char *name, const struct hello *hello, int fd)
{
    int connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (connection < 0) {
        (void)smpi_fail(SMPI_ERR_SYS, "socket: %s", strerror(errno));
        return NEVER;
    }
    enum delivery answer = NEVER;
    struct sockaddr_un address;
    socklen_t length = abstract_address(&address, name);
    uid_t uid;
    if (connect(connection, (struct sockaddr *)&address, length) != 0) {
        if (errno == EAGAIN || errno == EINTR)
            answer = LATER; /* its queue is full */
        else
            (void)smpi_fail(SMPI_ERR_REFUSED, "connect: %s (another network namespace?)", strerror(errno));
    } else if (!peer_uid(connection, &uid)) {
        (void)smpi_fail(SMPI_ERR_SYS, "SO_PEERCRED: %s", strerror(errno));
    } else if (uid != geteuid()) {
        (void)smpi_fail(SMPI_ERR_REFUSED, "its socket belongs to uid %ld, not %ld", (long)uid, (long)geteuid());
    } else {
        union {
            struct cmsghdr align;
            char bytes[CMSG_SPACE(sizeof(int))];
        } control;
        memset(&control, 0, sizeof control);
        struct iovec part = {.iov_base = (void *)(uintptr_t)hello, .iov_len = sizeof *hello};
        struct msghdr message = {
            .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(header), &fd, sizeof fd);
        if (sendmsg(connection, &message, MSG_NOSIGNAL) == (ssize_t)sizeof *hello)
            answer = DELIVERED;
        else if (errno == EAGAIN || errno == EINTR || errno == ENOBUFS || errno == ENOMEM || errno == EPIPE ||
                 errno == ECONNRESET ||
                 errno == ETOOMANYREFS) /* too many descriptors under way: peers must take some first */
            answer = LATER;
        else
            (void)smpi_fail(smpi_system_status(errno), "sendmsg: %s", strerror(errno));
    }
    close(connection);
    return answer;
}

/* ---- receiving ---- */

struct arrivals {
    smpi_world *world;
    const char *token;
    int *waiting; /* [room] accepted connections that have not said anything yet, oldest first */
    int count, room;
    int missing;   /* ranks whose descriptor has not come */
    int dropped;   /* connections closed because they were not what we expect ... */
    char why[128]; /* ... and what the last of them did */
};

static void drop(struct arrivals *in, const char *why)
{
    in->dropped++;
    snprintf(in->why, sizeof in->why, "%s", why);
}

static void accept_all(struct arrivals *in, int listener)
{
    for (;;) {
        int connection = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (connection < 0) {
            if (errno == ECONNABORTED || errno == EINTR)
                continue;
            if (errno != EAGAIN)
                drop(in, strerror(errno));
            return;
        }
        uid_t uid;
        if (!peer_uid(connection, &uid) || uid != geteuid()) {
            drop(in, "it came from another uid");
            close(connection);
            continue;
        }
        if (in->count ==
            in->room) { /* a peer speaks as soon as it is connected, so the oldest silent one is the worst guest */
            drop(in, "it said nothing");
            close(in->waiting[0]);
            memmove(in->waiting, in->waiting + 1, (size_t)(in->room - 1) * sizeof *in->waiting);
            in->count--;
        }
        in->waiting[in->count++] = connection;
    }
}

/* A descriptor is as good as its word only if it is a sealed memory file of the size that will be mapped. */
static const char *fault_of_segment(int fd, uint64_t bytes)
{
    struct stat about;
    if (fstat(fd, &about) != 0 || !S_ISREG(about.st_mode))
        return "its descriptor is not a memory file";
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & SMPI_MEMFD_SEALS) != SMPI_MEMFD_SEALS)
        return "its descriptor is not a sealed memory file";
    if ((uint64_t)about.st_size != bytes)
        return "its memory file has another size than ours";
    return NULL;
}

static const char *fault_of_hello(const struct arrivals *in, const struct hello *hello)
{
    const smpi_world *world = in->world;
    if (memcmp(hello->magic, magic, sizeof magic) != 0)
        return "it did not speak our protocol";
    if (memcmp(hello->token, in->token, TOKEN_BYTES) != 0)
        return "its token is of another job";
    if (hello->size != world->size || hello->rank < 0 || hello->rank >= world->size || hello->rank == world->rank)
        return "it claimed a rank that is not a peer";
    if (world->memfd->fds[hello->rank] >= 0)
        return "it claimed the rank of a peer that was here already";
    return NULL;
}

/* Takes the one message of a connection. 0: nothing there yet; 1: the connection has had its say. */
static int receive(struct arrivals *in, int connection)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(MAX_DESCRIPTORS * sizeof(int))];
    } control;
    struct hello hello;
    struct iovec part = {.iov_base = &hello, .iov_len = sizeof hello};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    ssize_t length = recvmsg(connection, &message, MSG_CMSG_CLOEXEC);
    if (length < 0) {
        if (errno == EAGAIN || errno == EINTR)
            return 0;
        drop(in, strerror(errno));
        return 1;
    }

    int fds[MAX_DESCRIPTORS];
    size_t count = 0;
    for (struct cmsghdr *header = CMSG_FIRSTHDR(&message); header != NULL; header = CMSG_NXTHDR(&message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
            continue;
        size_t here = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < here && count < MAX_DESCRIPTORS; i++)
            memcpy(&fds[count++], CMSG_DATA(header) + i * sizeof(int), sizeof(int));
    }
    const char *fault = NULL;
    if (length != (ssize_t)sizeof hello || (message.msg_flags & MSG_TRUNC) != 0)
        fault = length == 0 ? "it left without a word" : "its message had the wrong length";
    else if ((message.msg_flags & MSG_CTRUNC) != 0)
        fault = "its descriptor could not be taken (limit of open files?)";
    else if ((fault = fault_of_hello(in, &hello)) == NULL)
        fault = count == 1 ? fault_of_segment(fds[0], in->world->bytes) : "it did not bring exactly one descriptor";
    if (fault == NULL) {
        in->world->memfd->fds[hello.rank] = fds[0];
        in->missing--;
        return 1;
    }
    drop(in, fault);
    for (size_t i = 0; i < count; i++)
        close(fds[i]);
    return 1;
}

struct text {
    char bytes[1024];
    size_t length;
};

static void __attribute__((format(printf, 2, 3))) append(struct text *text, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int written = vsnprintf(text->bytes + text->length, sizeof text->bytes - text->length, format, arguments);
    va_end(arguments);
    if (written > 0) {
        size_t room = sizeof text->bytes - text->length - 1;
        text->length += (size_t)written < room ? (size_t)written : room;
    }
}

static int report_timeout(const struct arrivals *in, const unsigned char *sent, int timeout_ms)
{
    const smpi_world *world = in->world;
    struct text silent = {.length = 0}, unreached = {.length = 0};
    for (int r = 0; r < world->size; r++) {
        if (r == world->rank)
            continue;
        if (world->memfd->fds[r] < 0)
            append(&silent, "%s%d", silent.length > 0 ? ", " : "", r);
        if (!sent[r])
            append(&unreached, "%s%d", unreached.length > 0 ? ", " : "", r);
    }
    struct text text = {.length = 0};
    append(&text, "after %d ms", timeout_ms);
    if (silent.length > 0)
        append(&text, " no descriptor had come from rank %s", silent.bytes);
    if (unreached.length > 0)
        append(&text, "%s ours could not be sent to rank %s", silent.length > 0 ? " and" : "", unreached.bytes);
    if (in->dropped > 0)
        append(&text, "; connections dropped: %d, the last because %s", in->dropped, in->why);
    return smpi_fail(SMPI_ERR_TIMEOUT, "%s", text.bytes);
}

/* The loop of exchange; its caller owns the memory. sent[r] is 1 once rank r has, or can never have, our descriptor. */
static int meet(struct arrivals *in, const char *names, unsigned char *sent, struct pollfd *polls, int timeout_ms)
{
    smpi_world *world = in->world;
    struct smpi_memfd *memfd = world->memfd;
    struct hello hello = {.rank = world->rank, .size = world->size};
    memcpy(hello.magic, magic, sizeof magic);
    memcpy(hello.token, in->token, TOKEN_BYTES);

    int64_t deadline = now_ms() + timeout_ms;
    int unsent = world->size - 1;
    struct text refusals = {.length = 0};
    for (;;) {
        for (int step = 1; step < world->size && unsent > 0; step++) {
            int to = (world->rank + step) % world->size; /* rotated, so that not all knock at rank 0 first */
            enum delivery answer =
                sent[to] ? LATER : deliver(names + (size_t)to * NAME_BYTES, &hello, memfd->fds[world->rank]);
            if (answer == LATER)
                continue;
            if (answer == NEVER)
                append(&refusals, "%srank %d: %s", refusals.length > 0 ? "; " : "", to, smpi_reason());
            sent[to] = 1;
            unsent--;
        }
        if (unsent == 0 &&
            refusals.length > 0) /* the others have ours by now and need not wait for a rank that gave up */
            return smpi_fail(SMPI_ERR_REFUSED, "descriptors could not be sent: %s", refusals.bytes);
        if (unsent == 0 && in->missing == 0)
            return SMPI_OK;

        int64_t left = deadline - now_ms();
        if (left <= 0)
            return report_timeout(in, sent, timeout_ms);
        polls[0] = (struct pollfd){.fd = memfd->listener, .events = POLLIN};
        for (int i = 0; i < in->count; i++)
            polls[1 + i] = (struct pollfd){.fd = in->waiting[i], .events = POLLIN};
        int pause = unsent > 0 && left > RETRY_MS ? RETRY_MS : (int)left;
        int ready = poll(polls, (nfds_t)(1 + in->count), pause);
        if (ready < 0 && errno != EINTR)
            return smpi_fail(SMPI_ERR_SYS, "poll: %s", strerror(errno));
        if (ready <= 0)
            continue;
        int kept = 0;
        for (int i = 0; i < in->count; i++) {
            if (polls[1 + i].revents != 0 && receive(in, in->waiting[i]))
                close(in->waiting[i]);
            else
                in->waiting[kept++] = in->waiting[i];
        }
        in->count = kept;
        accept_all(in, memfd->listener);
    }
}

int smpi_memfd_exchange(smpi_world *world, const char *names, const char *token, int timeout_ms)
{
    struct smpi_memfd *memfd = world->memfd;
    if (memfd == NULL || memfd->fds[world->rank] < 0 || memfd->listener < 0)
        return smpi_fail(SMPI_ERR_ARG, "exchange comes after open and listen");
    struct arrivals in = {.world = world, .token = token, .room = world->size + STRANGERS, .missing = world->size - 1};
    for (int r = 0; r < world->size; r++)
        in.missing -= r != world->rank && memfd->fds[r] >= 0;
    in.waiting = malloc((size_t)in.room * sizeof *in.waiting);
    struct pollfd *polls = malloc((size_t)(in.room + 1) * sizeof *polls);
    unsigned char *sent = calloc((size_t)world->size, 1);
    int status;
    if (in.waiting == NULL || polls == NULL || sent == NULL)
        status = smpi_fail(SMPI_ERR_NOMEM, "no memory to meet %d ranks", world->size);
    else
        status = meet(&in, names, sent, polls, timeout_ms);
    for (int i = 0; i < in.count; i++)
        close(in.waiting[i]);
    free(in.waiting);
    free(polls);
    free(sent);
    return status;
}
