/* test_fabric.c - worlds of real processes: descriptors come round, addresses agree, and nobody else gets in.
 *
 * Ranks are forked children that meet at barriers in a shared page, where MPI calls stand in real life. A child reports
 * by its exit code. Strangers knock before the ranks begin to listen to their queues, so they are always served first.
 * */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "fabric/world.h"
#include "memory/shadow.h"

#define RANKS 3
#define BYTES ((uint64_t)64 << 20)
#ifdef __SANITIZE_THREAD__
#define BASE UINT64_C(0x7e9000000000) /* ThreadSanitizer keeps its shadow in most of the address space */
#else
#define BASE UINT64_C(0x200000000000)
#endif
#define NOBODY 65534

static const char token[16] = "fifteen letters";

/* What the ranks of a run share. */
static struct shared {
    pthread_barrier_t barrier;
    char names[RANKS * 64];
    uint64_t bases[RANKS];
} *shared;

typedef void rank_body(int rank);

static void meet(void)
{
    pthread_barrier_wait(&shared->barrier);
}

/* Exit codes of the children are checked by the parent: 0 passed. */
static void start_ranks(pid_t *children, rank_body *body)
{
    pthread_barrierattr_t attributes;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    memset(shared, 0, sizeof *shared);
    pthread_barrier_init(&shared->barrier, &attributes, RANKS);
    fflush(stdout);
    for (int rank = 0; rank < RANKS; rank++) {
        children[rank] = fork();
        REQUIRE(children[rank] >= 0);
        if (children[rank] == 0) {
            alarm(60); /* a rank that waits for a dead one */
            atomic_store(&check_failures, 0);
            body(rank);
            _exit(atomic_load(&check_failures) != 0);
        }
    }
}

static void run_ranks(rank_body *body)
{
    pid_t children[RANKS];
    start_ranks(children, body);
    for (int rank = 0; rank < RANKS; rank++) {
        int status = -1;
        waitpid(children[rank], &status, 0);
        check_note(WIFEXITED(status) && WEXITSTATUS(status) == 0, __FILE__, __LINE__, "rank %d ended with %#x", rank,
                   status);
    }
}

static int open_descriptors(void)
{
    DIR *folder = opendir("/proc/self/fd");
    REQUIRE(folder != NULL);
    int count = -1; /* the one of folder itself */
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;)
        count += entry->d_name[0] != '.';
    closedir(folder);
    return count;
}

static int count_lines_with(const char *path, const char *text)
{
    FILE *file = fopen(path, "r");
    REQUIRE(file != NULL);
    char line[4096];
    int count = 0;
    while (fgets(line, sizeof line, file) != NULL)
        count += strstr(line, text) != NULL;
    fclose(file);
    return count;
}

static smpi_world *open_and_listen(int rank)
{
    smpi_world *world = smpi_world_new(rank, RANKS);
    REQUIRE(world != NULL);
    CHECK_EQ(smpi_memfd_open(world, BYTES), SMPI_OK);
    CHECK_EQ(smpi_memfd_listen(world, shared->names + rank * 64), SMPI_OK);
    meet();
    return world;
}

/* After exchange: map at base, or anywhere if that fails; start; everybody writes its rank and reads the others'. */
static void map_and_talk(smpi_world *world, uint64_t base)
{
    int rank = world->rank;
    int status = smpi_memfd_map(world, base);
    if (status != SMPI_OK) {
        CHECK_EQ(status, SMPI_ERR_REFUSED);
        CHECK_STR(smpi_world_driver(world), "none");
        status = smpi_memfd_map(world, 0);
    }
    REQUIRE(status == SMPI_OK);
    smpi_memfd_finish(world);
    CHECK_STR(smpi_world_driver(world), "memfd");
    shared->bases[rank] = smpi_world_base(world, rank);
    meet();
    CHECK_EQ(smpi_world_start(world, shared->bases, 2, BYTES / 2, 0), SMPI_OK);
    /* The far end of the segment, away from what the heap keeps at its beginning. */
    uint64_t mine = shared->bases[rank] + BYTES - sizeof(int);
    *(int *)(uintptr_t)mine = 100 + rank;
    meet();
    for (int peer = 0; peer < RANKS; peer++) {
        int *cell = smpi_shadow(world, peer, shared->bases[peer] + BYTES - sizeof(int));
        CHECK((char *)cell == world->segment[peer] + BYTES - sizeof(int));
        CHECK_EQ(*cell, 100 + peer);
    }
    meet();
    for (int peer = 0; peer < RANKS; peer++) /* and the other way round: a peer writes into my segment */
        if (peer == (rank + 1) % RANKS)
            *(int *)smpi_shadow(world, peer, shared->bases[peer] + BYTES - sizeof(int)) = 200 + rank;
    meet();
    CHECK_EQ(*(int *)(uintptr_t)mine, 200 + (rank + RANKS - 1) % RANKS);
    meet();
}

static void share_body(int rank)
{
    int before = open_descriptors();
    smpi_world *world = open_and_listen(rank);
    CHECK_EQ(smpi_memfd_exchange(world, shared->names, token, 20000), SMPI_OK);
    meet();
    map_and_talk(world, BASE);
    CHECK_EQ(smpi_world_bytes(world), BYTES);
    for (int peer = 0; peer < RANKS; peer++) {
        CHECK_EQ(smpi_world_base(world, peer), BASE + (uint64_t)peer * BYTES);
        CHECK_EQ(world->delta[peer], 0);
    }
    CHECK_EQ(smpi_world_base(world, RANKS), 0);
    CHECK_EQ(world->cores, 2);
    CHECK_EQ(open_descriptors(), before + 1); /* the own segment's, kept for forked children */
    CHECK(fcntl(world->fd, F_GETFD) & FD_CLOEXEC);
    CHECK(ftruncate(world->fd, (off_t)BYTES / 2) != 0 && errno == EPERM);
    CHECK(ftruncate(world->fd, (off_t)BYTES * 2) != 0 && errno == EPERM);
    smpi_world_delete(world);
    CHECK_EQ(open_descriptors(), before);
    CHECK_EQ(count_lines_with("/proc/self/maps", "memfd:stratampi"), 0);
}

static void test_peers_share_memory_at_the_same_addresses(void)
{
    run_ranks(share_body);
}

static void taken_body(int rank)
{
    char *in_the_way = NULL;
    if (rank == 1) {
        in_the_way = mmap((void *)(uintptr_t)(BASE + 2 * BYTES), 4096, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        REQUIRE(in_the_way != MAP_FAILED);
        *in_the_way = 7;
    }
    smpi_world *world = open_and_listen(rank);
    CHECK_EQ(smpi_memfd_exchange(world, shared->names, token, 20000), SMPI_OK);
    meet();
    map_and_talk(world, BASE);
    if (rank == 1) {
        CHECK_EQ(*in_the_way, 7);
        CHECK(smpi_world_base(world, 1) % (2 << 20) == 0);
        CHECK(world->delta[0] != 0);
        CHECK_EQ(world->delta[1], 0);
    } else {
        CHECK_EQ(world->delta[0], 0);
        CHECK_EQ(world->delta[1], (ptrdiff_t)(BASE + BYTES - shared->bases[1]));
    }
    smpi_world_delete(world);
}

static void test_a_taken_range_becomes_a_delta(void)
{
    run_ranks(taken_body);
}

/* ---- strangers ---- */

/* The message of native/fabric/meeting.c, spelled out a second time: a change of the protocol must show here. */
struct hello {
    char magic[8];
    char token[16];
    int32_t rank, size;
};

static struct hello hello_of(int rank, int size)
{
    struct hello hello = {.rank = rank, .size = size};
    memcpy(hello.magic, "smpi-fd1", sizeof hello.magic);
    memcpy(hello.token, token, sizeof hello.token);
    return hello;
}

/* A connection to `name`, or -1 with errno. */
static int knock(const char *name)
{
    int connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    REQUIRE(connection >= 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strcpy(address.sun_path + 1, name);
    socklen_t length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name));
    if (connect(connection, (struct sockaddr *)&address, length) == 0)
        return connection;
    int error = errno;
    close(connection);
    errno = error;
    return -1;
}

/* Says `bytes` of what, with `count` descriptors, and leaves. 1 if the kernel took it. */
static int say(const char *name, const void *what, size_t bytes, const int *fds, int count)
{
    int connection = knock(name);
    if (connection < 0)
        return 0;
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(4 * sizeof(int))];
    } control;
    memset(&control, 0, sizeof control);
    struct iovec part = {.iov_base = (void *)(uintptr_t)what, .iov_len = bytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (count > 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE((size_t)count * sizeof(int));
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN((size_t)count * sizeof(int));
        memcpy(CMSG_DATA(header), fds, (size_t)count * sizeof(int));
    }
    int taken = sendmsg(connection, &message, MSG_NOSIGNAL) == (ssize_t)bytes;
    close(connection);
    return taken;
}

static int memory_file(uint64_t bytes, int seals)
{
    int fd = memfd_create("stranger", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    REQUIRE(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    if (seals)
        REQUIRE(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
    return fd;
}

/* Everything but the token, and with it: from another uid. */
static void knock_as_nobody(const char *name)
{
    pid_t child = fork();
    if (child == 0) {
        struct hello hello = hello_of(1, RANKS);
        int fd = memory_file(BYTES, 1);
        _exit(setuid(NOBODY) == 0 && say(name, &hello, sizeof hello, &fd, 1) ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Knocks at rank 0 in every wrong way; the silent connections stay open in `silent`. */
static void misbehave(const char *name, int *silent)
{
    int good = memory_file(BYTES, 1), small = memory_file(BYTES / 2, 1), soft = memory_file(BYTES, 0);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    int two[2] = {good, good};
    REQUIRE(null >= 0);
    silent[0] = knock(name);
    CHECK(silent[0] >= 0);
    close(knock(name)); /* gone before it said anything */
    CHECK(say(name, "hi", 2, NULL, 0));
    char garbage[4096];
    memset(garbage, 'x', sizeof garbage);
    CHECK(say(name, garbage, sizeof garbage, two, 2));

    struct hello hello = hello_of(1, RANKS);
    CHECK(say(name, &hello, sizeof hello, NULL, 0));
    CHECK(say(name, &hello, sizeof hello, two, 2));
    CHECK(say(name, &hello, sizeof hello, &small, 1));
    CHECK(say(name, &hello, sizeof hello, &soft, 1));
    CHECK(say(name, &hello, sizeof hello, &null, 1));
    hello.token[3] ^= 1;
    CHECK(say(name, &hello, sizeof hello, &good, 1));
    for (int rank = -1; rank <= RANKS; rank += RANKS + 1) {
        hello = hello_of(rank, RANKS);
        CHECK(say(name, &hello, sizeof hello, &good, 1));
    }
    hello = hello_of(0, RANKS); /* its own rank */
    CHECK(say(name, &hello, sizeof hello, &good, 1));
    hello = hello_of(1, RANKS + 1); /* of a larger job */
    CHECK(say(name, &hello, sizeof hello, &good, 1));
    if (geteuid() == 0)
        knock_as_nobody(name);
    silent[1] = knock(name);
    CHECK(silent[1] >= 0);
    close(good), close(small), close(soft), close(null);
}

static void strangers_body(int rank)
{
    int before = open_descriptors();
    smpi_world *world = open_and_listen(rank);
    int silent[2] = {-1, -1};
    if (rank == 2)
        misbehave(shared->names, silent);
    meet();
    CHECK_EQ(smpi_memfd_exchange(world, shared->names, token, 20000), SMPI_OK);
    meet();
    if (rank == 2)
        close(silent[0]), close(silent[1]);
    map_and_talk(world, BASE);
    CHECK_EQ(open_descriptors(), before + 1); /* also what strangers passed is closed */
    smpi_world_delete(world);
}

static void test_strangers_are_ignored(void)
{
    if (geteuid() != 0)
        printf("     (not root: the stranger of another uid stays at home)\n");
    run_ranks(strangers_body);
}

/* The queue of rank 0 is filled with silent connections before the peers come: they must get in all the same. */
static void crowd_body(int rank)
{
    int before = open_descriptors();
    smpi_world *world = open_and_listen(rank);
    int crowd[1024], count = 0;
    if (rank == 2) {
        while (count < 1024 && (crowd[count] = knock(shared->names)) >= 0)
            count++;
        CHECK(count > RANKS && count < 1024);
        CHECK_EQ(errno, EAGAIN);
    }
    meet();
    if (rank == 0)
        usleep(30000); /* the others find its queue full first */
    CHECK_EQ(smpi_memfd_exchange(world, shared->names, token, 20000), SMPI_OK);
    meet();
    while (count > 0)
        close(crowd[--count]);
    map_and_talk(world, BASE);
    CHECK_EQ(open_descriptors(), before + 1);
    smpi_world_delete(world);
}

static void test_a_silent_crowd_keeps_nobody_out(void)
{
    run_ranks(crowd_body);
}

/* The first descriptor of a rank counts: rank 1 is played by hand and speaks twice. */
static void test_a_rank_speaks_once(void)
{
    int before = open_descriptors();
    char names[2 * 64];
    smpi_world *world = smpi_world_new(0, 2), *other = smpi_world_new(1, 2);
    REQUIRE(world != NULL && other != NULL);
    REQUIRE(smpi_memfd_open(world, BYTES) == SMPI_OK);
    REQUIRE(smpi_memfd_listen(world, names) == SMPI_OK && smpi_memfd_listen(other, names + 64) == SMPI_OK);
    int first = memory_file(BYTES, 1), second = memory_file(BYTES, 1);
    REQUIRE(pwrite(first, "first", 6, 0) == 6 && pwrite(second, "second", 7, 0) == 7);
    struct hello hello = hello_of(1, 2);
    CHECK(say(names, &hello, sizeof hello, &first, 1));
    CHECK(say(names, &hello, sizeof hello, &second, 1));
    CHECK_EQ(smpi_memfd_exchange(world, names, token, 20000), SMPI_OK);
    CHECK_EQ(smpi_memfd_map(world, 0), SMPI_OK);
    smpi_memfd_finish(world);
    CHECK_STR((const char *)(uintptr_t)smpi_world_base(world, 1), "first");
    close(first), close(second);
    smpi_world_delete(world);
    smpi_world_delete(other);
    CHECK_EQ(open_descriptors(), before);
}

/* ---- peers that do not come ---- */

static void missing_body(int rank)
{
    int before = open_descriptors();
    smpi_world *world = open_and_listen(rank);
    if (rank != 2) {
        CHECK_EQ(smpi_memfd_exchange(world, shared->names, token, 300), SMPI_ERR_TIMEOUT);
        CHECK(strstr(smpi_reason(), "from rank 2") != NULL);
        CHECK_EQ(smpi_memfd_map(world, BASE), SMPI_ERR_ARG);
    }
    meet();
    smpi_memfd_finish(world);
    CHECK_STR(smpi_world_driver(world), "none");
    CHECK_EQ(open_descriptors(), before);
    smpi_world_delete(world);
}

static void test_a_missing_rank_is_named(void)
{
    run_ranks(missing_body);
}

static void absent_body(int rank)
{
    smpi_world *world = open_and_listen(rank);
    if (rank == 2)
        smpi_memfd_finish(world); /* its socket is gone, as if in another network namespace */
    meet();
    if (rank != 2) {
        CHECK_EQ(smpi_memfd_exchange(world, shared->names, token, 20000), SMPI_ERR_REFUSED);
        CHECK(strstr(smpi_reason(), "rank 2: connect: ") != NULL);
        CHECK(strstr(smpi_reason(), "rank 1: ") == NULL && strstr(smpi_reason(), "rank 0: ") == NULL);
    }
    meet(); /* a rank that gave up keeps its socket until all have agreed */
    smpi_world_delete(world);
}

static void test_an_unreachable_rank_is_refused_without_waiting(void)
{
    run_ranks(absent_body);
}

static void impostor_body(int rank)
{
    if (rank == 2)
        REQUIRE(setuid(NOBODY) == 0);
    smpi_world *world = open_and_listen(rank);
    if (rank != 2) {
        CHECK_EQ(smpi_memfd_exchange(world, shared->names, token, 20000), SMPI_ERR_REFUSED);
        CHECK(strstr(smpi_reason(), "rank 2: its socket belongs to uid 65534") != NULL);
    }
    meet();
    smpi_world_delete(world);
}

static void test_a_listener_of_another_uid_gets_nothing(void)
{
    if (geteuid() != 0) {
        printf("     (not root: no other uid to try)\n");
        return;
    }
    run_ranks(impostor_body);
}

/* ---- systems that refuse ---- */

static int in_child(void (*body)(void))
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        atomic_store(&check_failures, 0);
        body();
        _exit(atomic_load(&check_failures) != 0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    return status;
}

static void small_files(void)
{
    struct rlimit limit = {.rlim_cur = BYTES / 2, .rlim_max = BYTES / 2};
    REQUIRE(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    int before = open_descriptors();
    smpi_world *world = smpi_world_new(0, 1);
    CHECK_EQ(smpi_memfd_open(world, BYTES), SMPI_ERR_REFUSED);
    CHECK(strstr(smpi_reason(), "ulimit -f") != NULL);
    CHECK_EQ(smpi_memfd_open(world, BYTES / 2), SMPI_OK); /* less is granted */
    smpi_world_delete(world);
    CHECK_EQ(open_descriptors(), before);
}

__attribute__((unused)) static void small_space(void)
{
    smpi_world *world = smpi_world_new(0, 1);
    const uint64_t bytes = (uint64_t)64 << 30;
    REQUIRE(smpi_memfd_open(world, bytes) == SMPI_OK);
    struct rlimit limit = {.rlim_cur = bytes / 2, .rlim_max = RLIM_INFINITY};
    REQUIRE(setrlimit(RLIMIT_AS, &limit) == 0);
    CHECK_EQ(smpi_memfd_map(world, BASE), SMPI_ERR_REFUSED);
    CHECK(strstr(smpi_reason(), "ulimit -v") != NULL);
    CHECK_EQ(smpi_memfd_map(world, 0), SMPI_ERR_REFUSED);
    limit.rlim_cur = RLIM_INFINITY;
    REQUIRE(setrlimit(RLIMIT_AS, &limit) == 0);
    CHECK_EQ(smpi_memfd_map(world, BASE), SMPI_OK);
    smpi_world_delete(world);
}

/* A container whose seccomp filter knows no memfd_create. */
static void no_memfd(void)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_memfd_create, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof code / sizeof *code, .filter = code};
    REQUIRE(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
        _exit(CHECK_SKIPPED);
    smpi_world *world = smpi_world_new(0, 1);
    CHECK_EQ(smpi_memfd_open(world, BYTES), SMPI_ERR_REFUSED);
    CHECK(strstr(smpi_reason(), "memfd_create: ") != NULL);
    CHECK_STR(smpi_world_driver(world), "none");
    smpi_world_delete(world);
}

static void test_limits_refuse_and_do_not_kill(void)
{
    CHECK_EQ(in_child(small_files), 0);
#ifndef __SANITIZE_ADDRESS__ /* whose own address space is beyond any limit */
#ifndef __SANITIZE_THREAD__
    CHECK_EQ(in_child(small_space), 0);
#endif
#endif
    int status = in_child(no_memfd);
    CHECK(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == CHECK_SKIPPED));
}

static void test_arguments(void)
{
    CHECK(smpi_world_new(1, 1) == NULL);
    CHECK(smpi_world_new(-1, 2) == NULL);
    CHECK(smpi_world_new(0, 0) == NULL);
    smpi_world *world = smpi_world_new(0, 1);
    REQUIRE(world != NULL);
    char name[64];
    uint64_t base = 0;
    CHECK_EQ(smpi_memfd_open(world, 0), SMPI_ERR_ARG);
    CHECK_EQ(smpi_memfd_open(world, BYTES + 4096), SMPI_ERR_ARG);
    CHECK_EQ(smpi_memfd_exchange(world, name, token, 10), SMPI_ERR_ARG);
    CHECK_EQ(smpi_memfd_map(world, BASE), SMPI_ERR_ARG);
    CHECK_EQ(smpi_world_start(world, &base, 1, BYTES, 0), SMPI_ERR_ARG);
    CHECK_EQ(smpi_memfd_open(world, BYTES), SMPI_OK);
    CHECK_EQ(smpi_memfd_open(world, BYTES), SMPI_ERR_ARG);
    CHECK_EQ(smpi_memfd_listen(world, name), SMPI_OK);
    CHECK_EQ(smpi_memfd_exchange(world, name, token, 10), SMPI_OK); /* alone: nobody to wait for */
    CHECK_EQ(smpi_memfd_map(world, BASE + 4096), SMPI_ERR_ARG);
    CHECK_EQ(smpi_memfd_map(world, BASE), SMPI_OK);
    CHECK_EQ(smpi_memfd_map(world, BASE), SMPI_ERR_ARG);
    CHECK_EQ(smpi_world_start(world, &base, 1, BYTES, 0), SMPI_ERR_ARG); /* not where the segment is */
    CHECK_EQ(smpi_adopt(world, &base, BYTES), SMPI_ERR_ARG);
    smpi_memfd_finish(world);
    smpi_world_delete(world);
}

/* ---- the driver window ---- */

static void test_adopted_segments_stay_mapped(void)
{
    char *memory = mmap(NULL, 2 * BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    smpi_world *world = smpi_world_new(1, 2);
    uint64_t bases[2] = {(uint64_t)(uintptr_t)memory, (uint64_t)(uintptr_t)memory + BYTES};
    uint64_t crooked[2] = {bases[0] + 8, bases[1]}, absent[2] = {0, bases[1]};
    CHECK_EQ(smpi_adopt(world, crooked, BYTES), SMPI_ERR_ARG);
    CHECK_EQ(smpi_adopt(world, absent, BYTES), SMPI_ERR_ARG);
    CHECK_EQ(smpi_adopt(world, bases, 100), SMPI_ERR_ARG);
    CHECK_STR(smpi_world_driver(world), "none");
    CHECK_EQ(smpi_adopt(world, bases, BYTES), SMPI_OK);
    CHECK_STR(smpi_world_driver(world), "window");
    uint64_t theirs[2] = {0x7000000000, bases[1]}; /* rank 0 sees its own elsewhere */
    CHECK_EQ(smpi_world_start(world, theirs, 0, BYTES, 0), SMPI_OK);
    CHECK_EQ(world->cores, 1);
    CHECK(smpi_shadow(world, 0, 0x7000000123) == memory + 0x123);
    CHECK(smpi_shadow(world, 1, bases[1] + 5) == memory + BYTES + 5);
    smpi_world_delete(world);
    memory[0] = memory[BYTES] = 1; /* still there */
    munmap(memory, 2 * BYTES);
}

/* Mapped once more, the segments lie where all ranks agree and outlive the mapping they came from (MPI_Finalize takes
 * that). */
static void test_adopted_segments_can_be_mapped_again(void)
{
    char *memory = mmap(NULL, 2 * BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    smpi_world *world = smpi_world_new(0, 2);
    uint64_t bases[2] = {(uint64_t)(uintptr_t)memory + BYTES, (uint64_t)(uintptr_t)memory}; /* in any order */
    CHECK_EQ(smpi_adopt_again(world, BASE), SMPI_ERR_ARG);
    CHECK_EQ(smpi_adopt(world, bases, BYTES), SMPI_OK);
    CHECK_EQ(smpi_adopt_again(world, BASE + 4096), SMPI_ERR_ARG);
    void *taken = mmap((void *)(uintptr_t)(BASE + BYTES), 4096, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    REQUIRE(taken != MAP_FAILED);
    CHECK_EQ(smpi_adopt_again(world, BASE), SMPI_ERR_REFUSED);
    CHECK_EQ(smpi_world_base(world, 0), bases[0]); /* as before */
    munmap(taken, 4096);
    CHECK_EQ(smpi_adopt_again(world, BASE), SMPI_OK);
    CHECK_EQ(smpi_adopt_again(world, BASE), SMPI_ERR_ARG);
    char *segment[2];
    for (int r = 0; r < 2; r++) {
        CHECK_EQ(smpi_world_base(world, r), BASE + (uint64_t)r * BYTES);
        segment[r] = (char *)(uintptr_t)smpi_world_base(world, r);
    }
    memory[BYTES] = 10;
    segment[1][BYTES - 1] = 11;
    CHECK_EQ(segment[0][0], 10);
    CHECK_EQ(memory[BYTES - 1], 11);
    munmap(memory, 2 * BYTES);
    CHECK_EQ(segment[0][0], 10);
    CHECK_EQ(segment[1][BYTES - 1], 11);
    uint64_t here[2] = {BASE, BASE + BYTES};
    CHECK_EQ(smpi_world_start(world, here, 1, BYTES, 1), SMPI_OK);
    CHECK_STR(smpi_world_driver(world), "window");
    CHECK_EQ(world->delta[0], 0);
    CHECK_EQ(world->delta[1], 0);
    smpi_world_delete(world);
    char line[32];
    snprintf(line, sizeof line, "%llx-", (unsigned long long)BASE);
    CHECK_EQ(count_lines_with("/proc/self/maps", line), 0); /* what we mapped, we unmap */
}

/* ---- a kill ---- */

static void doomed_body(int rank)
{
    smpi_world *world = open_and_listen(rank);
    CHECK_EQ(smpi_memfd_exchange(world, shared->names, token, 20000), SMPI_OK);
    meet();
    CHECK_EQ(smpi_memfd_map(world, BASE), SMPI_OK);
    if (rank == 0)
        smpi_memfd_finish(world); /* the others die with their sockets open */
    *world->segment[rank] = 1;
    meet();
    if (rank == 0)
        shared->bases[0] = 1; /* tells the parent */
    pause();
}

static int named_in_shm(void)
{
    DIR *folder = opendir("/dev/shm");
    int count = 0;
    for (struct dirent *entry; folder != NULL && (entry = readdir(folder)) != NULL;)
        count += strstr(entry->d_name, "stratampi") != NULL || strstr(entry->d_name, "smpi") != NULL;
    if (folder != NULL)
        closedir(folder);
    return count;
}

static void test_a_kill_leaves_nothing(void)
{
    pid_t children[RANKS];
    int before = named_in_shm();
    start_ranks(children, doomed_body);
    for (int i = 0; i < 20000 && *(volatile uint64_t *)&shared->bases[0] == 0; i++)
        usleep(1000);
    CHECK_EQ(shared->bases[0], 1);
    CHECK(count_lines_with("/proc/net/unix", shared->names + 64) > 0); /* so that the check below means something */
    for (int rank = 0; rank < RANKS; rank++)
        kill(children[rank], SIGKILL);
    for (int rank = 0; rank < RANKS; rank++) {
        int status = -1;
        waitpid(children[rank], &status, 0);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    }
    CHECK_EQ(named_in_shm(), before);
    for (int rank = 0; rank < RANKS; rank++)
        CHECK_EQ(count_lines_with("/proc/net/unix", shared->names + rank * 64), 0);
}

int main(void)
{
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(shared != MAP_FAILED);
    CHECK_RUN(test_arguments);
    CHECK_RUN(test_peers_share_memory_at_the_same_addresses);
    CHECK_RUN(test_a_taken_range_becomes_a_delta);
    CHECK_RUN(test_strangers_are_ignored);
    CHECK_RUN(test_a_silent_crowd_keeps_nobody_out);
    CHECK_RUN(test_a_rank_speaks_once);
    CHECK_RUN(test_a_missing_rank_is_named);
    CHECK_RUN(test_an_unreachable_rank_is_refused_without_waiting);
    CHECK_RUN(test_a_listener_of_another_uid_gets_nothing);
    CHECK_RUN(test_limits_refuse_and_do_not_kill);
    CHECK_RUN(test_adopted_segments_stay_mapped);
    CHECK_RUN(test_adopted_segments_can_be_mapped_again);
    CHECK_RUN(test_a_kill_leaves_nothing);
    return check_result();
}
