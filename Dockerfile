# posttrain for processors (the default) or CUDA:
#
#     docker build --tag posttrain .
#     docker build --tag posttrain:cuda --build-arg BUILD=cu129 .
#     docker build --target test .        # trains: docs/start/first-run.md, as it stands there
#     docker run --rm --volume "$PWD:/work" posttrain rl --tasks sums.jsonl --env my.py:reward ...
#
# PyTorch's own builds hold what they need of CUDA; the machine brings its driver (docker run --gpus all).
FROM python:3.11-slim-bookworm AS base

# cpu, or one of CUDA that PyTorch's index has a build of this version for
ARG BUILD=cpu
ARG TORCH=2.13.0

# a compiler, for the inner loops, which are compiled once; any version of it will do
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY constraints.txt pyproject.toml setup.py README.md LICENSE ./
RUN grep -v "^torch==" constraints.txt > /tmp/constraints.txt \
    && pip install --no-cache-dir --index-url "https://download.pytorch.org/whl/${BUILD}" "torch==${TORCH}"
COPY posttrain posttrain
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt .

# idle threads that spin would take the processor from the rest of a run
ENV OMP_WAIT_POLICY=passive


FROM base AS test
COPY tests/helpers/documents.py tests/helpers/first_run.py tests/helpers/
COPY docs/start/first-run.md docs/start/
WORKDIR /try
RUN python /src/tests/helpers/first_run.py


FROM base AS run
RUN useradd --create-home --uid 1000 user
USER 1000
WORKDIR /work
ENTRYPOINT ["posttrain"]
