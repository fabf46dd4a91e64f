/* array.h - the operators on NumPy arrays as they stand: the short way from a Python call into the runtime.
 *
 * An object is named by its address, CPython's id(), and must live until the call returns; a caller that has it as an argument
 * sees to that. Nothing is asked of Python: a plain numpy.ndarray, C or Fortran contiguous, of a dtype that has been learnt is read
 * through the struct that NumPy documents (PyArrayObject_fields), and so is a list of such an array and a datatype. Whatever else
 * comes, or does not fit, is SMPI_PARSE: nothing has happened yet, and the caller takes the long way (stratampi/buffers.py), which
 * understands all specifications and words all errors. */

enum smpi_known {
    SMPI_KNOWN_NOTHING,
    SMPI_KNOWN_NDARRAY,  /* numpy.ndarray; value 0 */
    SMPI_KNOWN_LIST,     /* list; value 0 */
    SMPI_KNOWN_DTYPE,    /* a dtype object; value: its SMPI_* type */
    SMPI_KNOWN_DATATYPE, /* a predefined MPI.Datatype object; value: its SMPI_* type */
    SMPI_KNOWN_OP,       /* a predefined MPI.Op object; value: its SMPI_* op */
    SMPI_KNOWN_IN_PLACE  /* MPI.IN_PLACE, None; value 0 */
};

/* From now on `object` stands for `value`; it must live as long as the process. Until the classes are learnt everything is
 * SMPI_PARSE. One thread at a time. SMPI_ERR_NOMEM: the table is full, and the object stays unknown. */
int smpi_array_learn(uint64_t object, int known, int value);

/* What the structs say, whether the classes are known or not: of an ndarray data, number of dimensions, dtype, flags; of a list
 * its length, and whether it holds the ndarray. For one comparison with what Python says, before the classes are learnt. */
void smpi_array_probe(uint64_t array, uint64_t list, uint64_t *fields);

/* As the operators of coll.h, and SMPI_PARSE for a comm of NULL. Counts and displacements are in elements of the side's datatype,
 * or where that is 0 (None) of the array's dtype; displacements NULL: one run behind the other. */
int smpi_array_barrier(smpi_comm *comm); /* no arrays, but NULL as above */
int smpi_array_bcast(smpi_comm *comm, uint64_t buffer, int root);
int smpi_array_reduce(smpi_comm *comm, uint64_t send, uint64_t recv, uint64_t op, int root);
int smpi_array_allreduce(smpi_comm *comm, uint64_t send, uint64_t recv, uint64_t op);
int smpi_array_allgather(smpi_comm *comm, uint64_t send, uint64_t recv);
int smpi_array_allgatherv(smpi_comm *comm, uint64_t send, uint64_t recv, const int64_t *counts, const int64_t *displs,
                          uint64_t datatype);
int smpi_array_alltoall(smpi_comm *comm, uint64_t send, uint64_t recv);
int smpi_array_alltoallv(smpi_comm *comm, uint64_t send, const int64_t *send_counts, const int64_t *send_displs,
                         uint64_t send_datatype, uint64_t recv, const int64_t *recv_counts, const int64_t *recv_displs,
                         uint64_t recv_datatype);
int smpi_array_gather(smpi_comm *comm, uint64_t send, uint64_t recv, int root);
int smpi_array_scatter(smpi_comm *comm, uint64_t send, uint64_t recv, int root);
int smpi_array_reduce_scatter_block(smpi_comm *comm, uint64_t send, uint64_t recv, uint64_t op);
int smpi_array_scan(smpi_comm *comm, uint64_t send, uint64_t recv, uint64_t op);
int smpi_array_exscan(smpi_comm *comm, uint64_t send, uint64_t recv, uint64_t op);
