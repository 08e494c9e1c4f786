# The Ascend image of one stack: an image of CANN, whose Python it uses, and the packages of one lock. The CANN that goes
# with the lock's torch-npu is the stack's in matrix.yaml; x86_64 and aarch64 alike.
#
# nox -s images builds it with everything a site needs; by hand, with BuildKit:
#   docker build -f docker/npu.Dockerfile --build-arg LOCK=locks/newest-npu.txt docker
#
# Secrets (all optional, none ends in a layer): `site`, shell lines that export index settings; `ca`, a bundle of
# certificates. WHEELS_IMAGE and OVERRIDES_IMAGE are images that hold only files: local wheels, and what --with replaces.
ARG BASE_IMAGE=quay.io/ascend/cann:9.0.0-910b-ubuntu22.04-py3.11
ARG WHEELS_IMAGE=scratch
ARG OVERRIDES_IMAGE=scratch

# hadolint ignore=DL3006
FROM ${WHEELS_IMAGE} AS wheels
# hadolint ignore=DL3006
FROM ${OVERRIDES_IMAGE} AS overrides

# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS interpreter
ARG PYTHON=3.11
# CANN's own Python: its packages for compiling kernels are made for it.
RUN command -v "python${PYTHON}" >/dev/null \
    || { echo "the base image has no python${PYTHON}; take the CANN image of that Python" >&2; exit 1; }

FROM interpreter AS build
SHELL ["/bin/sh", "-eu", "-c"]
# A build has no device and no driver: torch must not load torch-npu by itself, and DeepSpeed's setup.py must not ask for
# an NPU. Without operators (DS_BUILD_OPS=0) its package is the same for every accelerator.
ENV UV_LINK_MODE=copy UV_SYSTEM_CERTS=1 UV_NO_PROGRESS=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1 \
    DS_ACCELERATOR=cpu DS_BUILD_OPS=0 TORCH_DEVICE_BACKEND_AUTOLOAD=0

WORKDIR /build
COPY locks/build-tools.txt ./
RUN --mount=type=secret,id=site --mount=type=secret,id=ca --mount=type=bind,from=wheels,target=/wheels \
    if [ -f /run/secrets/site ]; then . /run/secrets/site; fi; \
    if [ -f /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    "python${PYTHON}" -m venv /build/tools; \
    PIP_FIND_LINKS="/wheels ${PIP_FIND_LINKS:-}" \
    /build/tools/bin/pip install --no-cache-dir --quiet --require-hashes --requirement build-tools.txt
ENV PATH=/build/tools/bin:$PATH

ARG LOCK
ARG TORCH_INDEX=""
COPY install-stack.sh replace-packages.sh record-packages.py ./
COPY ${LOCK} ./stack.txt
RUN --mount=type=secret,id=site --mount=type=secret,id=ca --mount=type=bind,from=wheels,target=/wheels \
    --mount=type=cache,id=zero-regression-matrix-uv-no-operators,target=/root/.cache/uv \
    if [ -f /run/secrets/site ]; then . /run/secrets/site; fi; \
    if [ -f /run/secrets/ca ]; then export SSL_CERT_FILE=/run/secrets/ca; fi; \
    export UV_FIND_LINKS="/wheels${UV_FIND_LINKS:+,$UV_FIND_LINKS}"; \
    ./install-stack.sh "$(command -v "python${PYTHON}")" stack.txt /opt/stack
RUN --mount=type=secret,id=site --mount=type=secret,id=ca --mount=type=bind,from=wheels,target=/wheels \
    --mount=type=bind,from=overrides,target=/overrides,rw \
    --mount=type=cache,id=zero-regression-matrix-uv-no-operators,target=/root/.cache/uv \
    if [ -f /run/secrets/site ]; then . /run/secrets/site; fi; \
    if [ -f /run/secrets/ca ]; then export SSL_CERT_FILE=/run/secrets/ca; fi; \
    export UV_FIND_LINKS="/wheels${UV_FIND_LINKS:+,$UV_FIND_LINKS}"; \
    ./replace-packages.sh /opt/stack /overrides

FROM interpreter
COPY --from=build /opt/stack /opt/stack
# No ENTRYPOINT here: the base image's stays, which sets CANN's environment and then starts what is asked for.
# A named volume takes over owner and mode of the folder it covers: whoever runs the image can cache bytecode there.
RUN install -d -m 1777 /pycache
ENV PATH=/opt/stack/bin:$PATH PYTHONPYCACHEPREFIX=/pycache
USER 4242:4242
WORKDIR /project
CMD ["python"]
