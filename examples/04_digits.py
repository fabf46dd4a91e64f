"""Data-parallel training on real data: a network learns to read handwritten digits.

The data are scikit-learn's bundled digits: 1797 images of 8 x 8 pixels. Every rank has the same network and takes its
share of each mini-batch; one Allreduce a step sums the gradients of all ranks in place, and every rank makes the same
update. The network (64 - width - width - 10, ReLU) is wide for these images on purpose: with 2.5 million parameters,
10 MB of gradients travel in every step, about what a small real model sends.

Written for mpi4py; nothing in it knows about stratampi. Run it either way:

    mpirun -n 2 python examples/04_digits.py
    mpirun -n 2 python -m stratampi examples/04_digits.py

The seed is fixed and the sum of two numbers does not depend on their order, so with two ranks every run on one machine
ends with the same weights to the last bit; `weights crc32` shows it. tools/demo runs it both ways and compares.
"""

import argparse
import itertools
import os
import time
import zlib

# One core a rank: the ranks are the parallelism. Must be set before NumPy loads its BLAS.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from mpi4py import MPI
from sklearn.datasets import load_digits

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()


class Network:
    """Weights and gradients as views of one flat float32 array each, so that one Allreduce takes all gradients."""

    def __init__(self, widths, seed):
        shapes = [shape for a, b in itertools.pairwise(widths) for shape in ((a, b), (b,))]
        sizes = [int(np.prod(shape)) for shape in shapes]
        cuts = np.cumsum(sizes)[:-1]
        self.flat, self.grad, self.momentum = (np.zeros(sum(sizes), np.float32) for _ in range(3))
        self.weights = [part.reshape(shape) for part, shape in zip(np.split(self.flat, cuts), shapes, strict=True)]
        self.grads = [part.reshape(shape) for part, shape in zip(np.split(self.grad, cuts), shapes, strict=True)]
        rng = np.random.default_rng(seed)
        for weight in self.weights[::2]:
            weight[:] = rng.standard_normal(weight.shape, np.float32) * np.float32(np.sqrt(2 / weight.shape[0]))

    def forward(self, x):
        """Activations of every layer, the input first; the last are logits."""
        layers = [x]
        for number, (weight, bias) in enumerate(zip(self.weights[::2], self.weights[1::2], strict=True)):
            x = x @ weight + bias
            if number < len(self.weights) // 2 - 1:
                np.maximum(x, 0, out=x)
            layers.append(x)
        return layers

    def loss_and_gradient(self, x, labels, total):
        """Sum of the cross entropy over these images divided by `total`; its gradient goes to self.grad."""
        layers = self.forward(x)
        logits = layers.pop()
        logits -= logits.max(axis=1, keepdims=True)
        delta = np.exp(logits)
        delta /= delta.sum(axis=1, keepdims=True)
        rows = np.arange(len(labels))
        loss = -float(np.log(delta[rows, labels]).sum()) / total
        delta[rows, labels] -= 1
        delta /= np.float32(total)
        for number in reversed(range(len(layers))):
            np.matmul(layers[number].T, delta, out=self.grads[2 * number])
            delta.sum(axis=0, out=self.grads[2 * number + 1])
            if number:
                delta = delta @ self.weights[2 * number].T
                delta *= layers[number] > 0
        return loss

    def update(self, rate, decay):
        """A step of gradient descent with momentum."""
        self.momentum *= np.float32(decay)
        self.momentum += self.grad
        self.grad[:] = self.momentum  # the gradient is used up: its memory holds the scaled step
        self.grad *= np.float32(rate)
        self.flat -= self.grad

    def accuracy(self, x, labels):
        return float((self.forward(x)[-1].argmax(axis=1) == labels).mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1536, help="units of the two hidden layers")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32, help="images of a step, all ranks together")
    arguments = parser.parse_args()

    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:1437], order[1437:]
    network = Network((64, arguments.width, arguments.width, 10), seed=1)

    comm.Barrier()
    start = time.perf_counter()
    in_communication = 0.0
    shuffle = np.random.default_rng(2)  # the same on every rank: all agree on the batches
    steps = len(train) // arguments.batch
    for epoch in range(arguments.epochs):
        losses = 0.0
        batches = shuffle.permutation(train)[: steps * arguments.batch].reshape(steps, arguments.batch)
        for batch in batches:
            share = batch[rank::size]
            losses += network.loss_and_gradient(images[share], digits.target[share], arguments.batch)
            before = time.perf_counter()
            comm.Allreduce(MPI.IN_PLACE, network.grad)
            in_communication += time.perf_counter() - before
            network.update(rate=0.02, decay=0.9)
        loss = np.array([losses / steps])
        comm.Allreduce(MPI.IN_PLACE, loss)
        if rank == 0:
            print(f"epoch {epoch + 1}  loss {loss[0]:.6f}", flush=True)
    seconds = time.perf_counter() - start

    checksum = zlib.crc32(network.flat)
    assert comm.allgather(checksum) == [checksum] * size, "the ranks' weights have drifted apart"
    if rank == 0:
        print(f"ranks          {size}")
        print(f"parameters     {network.flat.size}")
        print(f"steps          {steps * arguments.epochs}")
        print(f"final loss     {float(loss[0])!r}")
        print(f"train accuracy {network.accuracy(images[train], digits.target[train]):.4f}")
        print(f"test accuracy  {network.accuracy(images[test], digits.target[test]):.4f}")
        print(f"weights crc32  {checksum:08x}")
        print(f"seconds        {seconds:.3f}")
        print(f"in Allreduce   {in_communication:.3f}")


if __name__ == "__main__":
    main()
