# The few commands of daily work. Each sets up what it needs (tools/setup, about a second when nothing changed).
.DEFAULT_GOAL := help
.PHONY: help setup demo test lint conformance bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## .venv with everything, and MPICH, Open MPI and Intel MPI in .mpi
	@tools/setup mpich openmpi impi

demo: ## an unmodified mpi4py program, first on plain mpi4py, then on stratampi
	@tools/setup mpich openmpi impi
	@tools/demo

test: ## all tests, on all three MPI libraries (about 20 minutes on 2 cores; tools/test --help narrows it)
	@tools/setup mpich openmpi impi
	@tools/test

lint: ## all static checks (tools/lint --fix mends what can be mended)
	@tools/lint

conformance: ## mpi4py's own test suite, with plain mpi4py and with our COMM_WORLD, on MPICH at 1, 2 and 3 ranks
	@tools/setup mpich
	@for n in 1 2 3; do .venv/bin/python tests/conformance/run.py -n $$n || exit 1; done

bench: ## latency and bandwidth against plain mpi4py, 2 ranks, on MPICH
	@tools/setup mpich
	@tools/mpirun mpich -n 2 .venv/bin/python -m stratampi.bench

clean: ## remove build/ (tools/setup builds again); .venv and .mpi stay
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .hypothesis .venv/.stamp
