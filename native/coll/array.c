/* array.c - reads arrays and calls the operators: see array.h. */
#include <stdatomic.h>
#include <stddef.h>

#include "../base/order.h"
#include "../sync/comm.h"

#define KNOWN_SLOTS 256 /* a power of two, several times what is ever learnt */

struct object { /* PyObject of CPython with the GIL */
    intptr_t references;
    uint64_t class;
};

struct ndarray { /* PyArrayObject_fields; the same since NumPy 1.0 */
    struct object object;
    char *data;
    int dimension_count;
    intptr_t *dimensions, *strides;
    uint64_t base, dtype;
    int flags;
};

struct list { /* PyListObject; the same since CPython 2.4 */
    struct object object;
    intptr_t count;
    uint64_t *items;
};

enum { C_CONTIGUOUS = 1, F_CONTIGUOUS = 2, ALIGNED = 0x100, WRITEABLE = 0x400 };

/* Written under the GIL, read without: an entry counts from when its object is there. */
static struct {
    _Atomic uint64_t object;
    int known, value;
} table[KNOWN_SLOTS];

static size_t first_slot(uint64_t object)
{
    return (size_t)(object >> 4 ^ object >> 12) % KNOWN_SLOTS;
}

int smpi_array_learn(uint64_t object, int known, int value)
{
    static int used;
    size_t slot = first_slot(object);
    uint64_t there;
    while ((there = smpi_read_relaxed(&table[slot].object)) && there != object) {
        slot = (slot + 1) % KNOWN_SLOTS;
    }
    if (!there && used++ == KNOWN_SLOTS / 2) { /* so that value_of always finds an end */
        used--;
        return SMPI_ERR_NOMEM;
    }
    table[slot].known = known;
    table[slot].value = value;
    smpi_write_release(&table[slot].object, object);
    return SMPI_OK;
}

/* What the object stands for, or -1 if it is not known as that. */
static int value_of(uint64_t object, int known)
{
    for (size_t slot = first_slot(object);; slot = (slot + 1) % KNOWN_SLOTS) {
        const uint64_t there = smpi_read_acquire(&table[slot].object);
        if (there == object) {
            return table[slot].known == known ? table[slot].value : -1;
        }
        if (!there) {
            return -1;
        }
    }
}

static const void *at(uint64_t object)
{
    return (const void *)(uintptr_t)object; /* NOLINT(performance-no-int-to-ptr) */
}

static size_t elements_of(const struct ndarray *array)
{
    size_t elements = 1;
    for (int i = 0; i < array->dimension_count; i++) {
        elements *= (size_t)array->dimensions[i];
    }
    return elements;
}

void smpi_array_probe(uint64_t array, uint64_t list, uint64_t *fields)
{
    const struct ndarray *ndarray = at(array);
    fields[0] = (uint64_t)(uintptr_t)ndarray->data;
    fields[1] = (uint64_t)ndarray->dimension_count;
    fields[2] = ndarray->dtype;
    fields[3] = (uint64_t)ndarray->flags;
    const struct list *pylist = at(list);
    fields[4] = (uint64_t)pylist->count;
    fields[5] = pylist->count == 2 ? pylist->items[0] : 0;
}

static int is_open(const struct smpi_comm *comm)
{
    return comm && !comm->is_closed;
}

/* One side of an operator. data is NULL for MPI.IN_PLACE only. */
struct side {
    char *data;
    size_t count, bytes; /* elements of type */
    int type;
    uint64_t named; /* the dtype or datatype object */
    void *held;     /* an array that this call keeps alive */
};

/* Of Python's stable ABI; not there in C tests, which have no lists. */
int PyGILState_Ensure(void) __attribute__((weak));
void PyGILState_Release(int state) __attribute__((weak));
void Py_IncRef(void *object) __attribute__((weak));
void Py_DecRef(void *object) __attribute__((weak));

/* The array and the datatype of a list of two. The caller holds the list, but another thread may change it: so under the GIL, and
 * with a reference to the array until `done`. 0 if the list is another. */
static int open_list(struct side *side, const struct list *list, uint64_t *array, uint64_t *datatype)
{
    const int state = PyGILState_Ensure();
    const int fits = list->count == 2 && value_of(list->items[1], SMPI_KNOWN_DATATYPE) >= 0;
    if (fits) {
        *array = list->items[0];
        *datatype = list->items[1];
        side->held = (void *)(uintptr_t)*array; /* NOLINT(performance-no-int-to-ptr) */
        Py_IncRef(side->held);
    }
    PyGILState_Release(state);
    return fits;
}

/* Lets go of what the sides hold and passes the status on. send may be NULL. */
static int done(int status, struct side *send, struct side *recv)
{
    if (recv->held || (send && send->held)) {
        const int state = PyGILState_Ensure();
        Py_DecRef(recv->held);
        if (send) {
            Py_DecRef(send->held);
        }
        PyGILState_Release(state);
    }
    return status;
}

static char nowhere; /* where an array without elements lies */

static int is_class(uint64_t object, int known)
{
    return value_of(((const struct object *)at(object))->class, known) >= 0;
}

/* An array, or [array, datatype]: 1 if that is what the object is, and one for the short way. */
static int read_side(struct side *side, uint64_t object, int writable)
{
    uint64_t datatype = 0;
    side->held = NULL;
    if (is_class(object, SMPI_KNOWN_LIST) && !open_list(side, at(object), &object, &datatype)) {
        return 0;
    }
    const struct ndarray *array = at(object);
    if (!is_class(object, SMPI_KNOWN_NDARRAY) || !(array->flags & (C_CONTIGUOUS | F_CONTIGUOUS)) ||
        (writable && !(array->flags & WRITEABLE))) {
        return 0;
    }
    const int own_type = value_of(array->dtype, SMPI_KNOWN_DTYPE);
    side->type = datatype ? value_of(datatype, SMPI_KNOWN_DATATYPE) : own_type;
    side->named = datatype ? datatype : array->dtype;
    if (own_type < 0 || side->type < 0 || (!datatype && !(array->flags & ALIGNED))) { /* mpi4py has no name for those */
        return 0;
    }
    const size_t item = smpi_type_size(side->type);
    side->bytes = elements_of(array) * smpi_type_size(own_type);
    side->count = side->bytes / item;
    side->data = side->bytes ? array->data : &nowhere;
    return side->bytes % item == 0;
}

static int read_send(struct side *side, uint64_t object)
{
    if (value_of(object, SMPI_KNOWN_IN_PLACE) >= 0) {
        *side = (struct side){0};
        return 1;
    }
    return read_side(side, object, 0);
}

int smpi_array_barrier(smpi_comm *comm)
{
    return is_open(comm) ? smpi_barrier(comm) : SMPI_PARSE;
}

int smpi_array_bcast(smpi_comm *comm, uint64_t buffer, int root)
{
    struct side side = {0};
    int status = SMPI_PARSE;
    if (is_open(comm) && read_side(&side, buffer, comm->rank != root)) {
        status = smpi_bcast(comm, side.data, side.bytes, root);
    }
    return done(status, NULL, &side);
}

/* Both sides of a reduction: the same type (identity, because long and long long are two MPI datatypes) and counts. */
static int read_reduction(struct side *send, struct side *recv, uint64_t sends, uint64_t receives, uint64_t op,
                          int *code)
{
    *code = value_of(op, SMPI_KNOWN_OP);
    return *code >= 0 && read_side(recv, receives, 1) && smpi_op_is_legal(recv->type, *code) &&
           read_send(send, sends) && (!send->data || (send->named == recv->named && send->count == recv->count));
}

int smpi_array_allreduce(smpi_comm *comm, uint64_t send, uint64_t recv, uint64_t op)
{
    struct side from = {0}, to = {0};
    int code, status = SMPI_PARSE;
    if (is_open(comm) && read_reduction(&from, &to, send, recv, op, &code)) {
        status = smpi_allreduce(comm, from.data, to.data, to.count, to.type, code);
    }
    return done(status, &from, &to);
}

int smpi_array_reduce(smpi_comm *comm, uint64_t send, uint64_t recv, uint64_t op, int root)
{
    struct side from = {0}, to = {0};
    int code, status = SMPI_PARSE;
    if (is_open(comm) && comm->rank == root) {
        if (read_reduction(&from, &to, send, recv, op, &code)) {
            status = smpi_reduce(comm, from.data, to.data, to.count, to.type, code, root);
        }
    } else if (is_open(comm)) {
        code = value_of(op, SMPI_KNOWN_OP);
        if (code >= 0 && read_side(&from, send, 0) && smpi_op_is_legal(from.type, code)) {
            status = smpi_reduce(comm, from.data, NULL, from.count, from.type, code, root);
        }
    }
    return done(status, &from, &to);
}

int smpi_array_allgather(smpi_comm *comm, uint64_t send, uint64_t recv)
{
    struct side from = {0}, to = {0};
    int status = SMPI_PARSE;
    if (is_open(comm) && read_side(&to, recv, 1) && to.count % (size_t)comm->size == 0 && read_send(&from, send)) {
        status = smpi_allgather(comm, from.data, from.bytes, to.data, to.bytes / (size_t)comm->size);
    }
    return done(status, &from, &to);
}

int smpi_array_alltoall(smpi_comm *comm, uint64_t send, uint64_t recv)
{
    struct side from = {0}, to = {0};
    int status = SMPI_PARSE;
    if (is_open(comm) && read_side(&to, recv, 1) && to.count % (size_t)comm->size == 0 && read_send(&from, send) &&
        from.count % (size_t)comm->size == 0) {
        const size_t size = (size_t)comm->size;
        status = smpi_alltoall(comm, from.data, from.bytes / size, to.data, to.bytes / size);
    }
    return done(status, &from, &to);
}

int smpi_array_gather(smpi_comm *comm, uint64_t send, uint64_t recv, int root)
{
    struct side from = {0}, to = {0};
    int status = SMPI_PARSE;
    if (is_open(comm) && comm->rank == root) {
        const size_t size = (size_t)comm->size;
        if (read_side(&to, recv, 1) && to.count % size == 0 && read_send(&from, send)) {
            status = smpi_gather(comm, from.data, from.bytes, to.data, to.bytes / size, root);
        }
    } else if (is_open(comm) && read_side(&from, send, 0)) {
        status = smpi_gather(comm, from.data, from.bytes, NULL, 0, root);
    }
    return done(status, &from, &to);
}

int smpi_array_scatter(smpi_comm *comm, uint64_t send, uint64_t recv, int root)
{
    struct side from = {0}, to = {0};
    int status = SMPI_PARSE;
    if (is_open(comm) && comm->rank == root) {
        const size_t size = (size_t)comm->size;
        if (read_side(&from, send, 0) && from.count % size == 0 &&
            (value_of(recv, SMPI_KNOWN_IN_PLACE) >= 0 || read_side(&to, recv, 1))) {
            status = smpi_scatter(comm, from.data, from.bytes / size, to.data, to.bytes, root);
        }
    } else if (is_open(comm) && read_side(&to, recv, 1)) {
        status = smpi_scatter(comm, NULL, 0, to.data, to.bytes, root);
    }
    return done(status, &from, &to);
}

int smpi_array_reduce_scatter_block(smpi_comm *comm, uint64_t send, uint64_t recv, uint64_t op)
{
    struct side from = {0}, to = {0};
    const int code = value_of(op, SMPI_KNOWN_OP);
    int status = SMPI_PARSE;
    if (is_open(comm) && code >= 0 && read_side(&to, recv, 1) && smpi_op_is_legal(to.type, code) &&
        read_send(&from, send)) {
        const size_t size = (size_t)comm->size;
        if (from.data ? from.named == to.named && from.count == to.count * size : to.count % size == 0) {
            const size_t count = from.data ? to.count : to.count / size;
            status = smpi_reduce_scatter_block(comm, from.data, to.data, count, to.type, code);
        }
    }
    return done(status, &from, &to);
}

int smpi_array_scan(smpi_comm *comm, uint64_t send, uint64_t recv, uint64_t op)
{
    struct side from = {0}, to = {0};
    int code, status = SMPI_PARSE;
    if (is_open(comm) && read_reduction(&from, &to, send, recv, op, &code)) {
        status = smpi_scan(comm, from.data, to.data, to.count, to.type, code);
    }
    return done(status, &from, &to);
}

int smpi_array_exscan(smpi_comm *comm, uint64_t send, uint64_t recv, uint64_t op)
{
    struct side from = {0}, to = {0};
    int code, status = SMPI_PARSE;
    if (is_open(comm) && read_reduction(&from, &to, send, recv, op, &code)) {
        status = smpi_exscan(comm, from.data, to.data, to.count, to.type, code);
    }
    return done(status, &from, &to);
}

struct runs {
    int64_t *counts, *displs; /* [size] bytes */
};

/* The side's runs in bytes, in the half of the communicator's table that `half` says. 0 if one is negative or leaves the array. */
static int read_runs(struct runs *runs, struct side *side, const smpi_comm *comm, int half, const int64_t *counts,
                     const int64_t *displs, uint64_t datatype)
{
    const int type = datatype ? value_of(datatype, SMPI_KNOWN_DATATYPE) : side->type;
    if (type < 0) {
        return 0;
    }
    const int64_t item = (int64_t)smpi_type_size(type);
    const int64_t limit = (int64_t)side->bytes / item;
    runs->counts = comm->runs + (ptrdiff_t)half * 2 * comm->size;
    runs->displs = runs->counts + comm->size;
    int64_t end = 0;
    for (int i = 0; i < comm->size; i++) {
        const int64_t displ = displs ? displs[i] : end;
        if (counts[i] < 0 || counts[i] > limit || (counts[i] && (displ < 0 || displ > limit - counts[i]))) {
            return 0;
        }
        end += counts[i];
        runs->counts[i] = counts[i] * item;
        runs->displs[i] = counts[i] ? displ * item : 0;
    }
    return 1;
}

int smpi_array_allgatherv(smpi_comm *comm, uint64_t send, uint64_t recv, const int64_t *counts, const int64_t *displs,
                          uint64_t datatype)
{
    struct side from = {0}, to = {0};
    struct runs into;
    int status = SMPI_PARSE;
    if (is_open(comm) && read_side(&to, recv, 1) && read_runs(&into, &to, comm, 0, counts, displs, datatype) &&
        read_send(&from, send)) {
        status = smpi_allgatherv(comm, from.data, from.bytes, to.data, into.counts, into.displs);
    }
    return done(status, &from, &to);
}

int smpi_array_alltoallv(smpi_comm *comm, uint64_t send, const int64_t *send_counts, const int64_t *send_displs,
                         uint64_t send_datatype, uint64_t recv, const int64_t *recv_counts, const int64_t *recv_displs,
                         uint64_t recv_datatype)
{
    struct side from = {0}, to = {0};
    struct runs out, into;
    int status = SMPI_PARSE;
    if (is_open(comm) && read_side(&to, recv, 1) &&
        read_runs(&into, &to, comm, 0, recv_counts, recv_displs, recv_datatype) && read_side(&from, send, 0) &&
        read_runs(&out, &from, comm, 1, send_counts, send_displs, send_datatype)) {
        status = smpi_alltoallv(comm, from.data, out.counts, out.displs, to.data, into.counts, into.displs);
    }
    return done(status, &from, &to);
}
