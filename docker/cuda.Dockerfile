# The CUDA image of one stack: an interpreter and the packages of one lock, CUDA's libraries among them as wheels. No
# toolkit, no compiler, no cache, no index. The driver's own libraries come from the host when a container starts.
#
# nox -s images builds it with everything a site needs; by hand, with BuildKit:
#   docker build -f docker/cuda.Dockerfile --build-arg LOCK=locks/newest-cuda.txt docker
# --target tools and --target frame are all of it but the wheels, which are several GB.
#
# Secrets (all optional, none ends in a layer): `site`, shell lines that export index settings; `ca`, a bundle of
# certificates. WHEELS_IMAGE and OVERRIDES_IMAGE are images that hold only files: local wheels, and what --with replaces.
ARG BASE_IMAGE=debian:bookworm-slim
ARG WHEELS_IMAGE=scratch
ARG OVERRIDES_IMAGE=scratch

# hadolint ignore=DL3006
FROM ${WHEELS_IMAGE} AS wheels
# hadolint ignore=DL3006
FROM ${OVERRIDES_IMAGE} AS overrides

# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS interpreter
ARG PYTHON=3.11
# The base image decides the release of Debian's packages; its tag or digest is the pin.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends "python${PYTHON}" \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*

FROM interpreter AS tools
SHELL ["/bin/sh", "-eu", "-c"]
# No compiler here either: every package has a wheel, and DeepSpeed builds none of its operators (DS_BUILD_OPS=0; the
# jobs use torch's optimizers). DS_ACCELERATOR=cpu is for its setup.py alone: a build has no device, and without
# operators the package is the same for every accelerator, so that uv's cache can be shared with the CPU image.
# hadolint ignore=DL3008,DL3009
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates "python${PYTHON}-venv"
ENV UV_LINK_MODE=copy UV_SYSTEM_CERTS=1 UV_NO_PROGRESS=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1 \
    DS_ACCELERATOR=cpu DS_BUILD_OPS=0

WORKDIR /build
COPY locks/build-tools.txt ./
RUN --mount=type=secret,id=site --mount=type=secret,id=ca --mount=type=bind,from=wheels,target=/wheels \
    if [ -f /run/secrets/site ]; then . /run/secrets/site; fi; \
    if [ -f /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    "python${PYTHON}" -m venv /build/tools; \
    PIP_FIND_LINKS="/wheels ${PIP_FIND_LINKS:-}" \
    /build/tools/bin/pip install --no-cache-dir --quiet --require-hashes --requirement build-tools.txt
ENV PATH=/build/tools/bin:$PATH
COPY install-stack.sh replace-packages.sh record-packages.py ./

FROM tools AS build
ARG LOCK
ARG TORCH_INDEX=""
COPY ${LOCK} ./stack.txt
RUN --mount=type=secret,id=site --mount=type=secret,id=ca --mount=type=bind,from=wheels,target=/wheels \
    --mount=type=cache,id=zero-regression-matrix-uv-no-operators,target=/root/.cache/uv \
    if [ -f /run/secrets/site ]; then . /run/secrets/site; fi; \
    if [ -f /run/secrets/ca ]; then export SSL_CERT_FILE=/run/secrets/ca; fi; \
    export UV_FIND_LINKS="/wheels${UV_FIND_LINKS:+,$UV_FIND_LINKS}"; \
    ./install-stack.sh "/usr/bin/python${PYTHON}" stack.txt /opt/stack
RUN --mount=type=secret,id=site --mount=type=secret,id=ca --mount=type=bind,from=wheels,target=/wheels \
    --mount=type=bind,from=overrides,target=/overrides,rw \
    --mount=type=cache,id=zero-regression-matrix-uv-no-operators,target=/root/.cache/uv \
    if [ -f /run/secrets/site ]; then . /run/secrets/site; fi; \
    if [ -f /run/secrets/ca ]; then export SSL_CERT_FILE=/run/secrets/ca; fi; \
    export UV_FIND_LINKS="/wheels${UV_FIND_LINKS:+,$UV_FIND_LINKS}"; \
    ./replace-packages.sh /opt/stack /overrides
# What only a compiler reads, and two libraries that nothing in a stack links to.
RUN rm -rf /opt/stack/lib/python*/site-packages/torch/include; \
    find /opt/stack -name '*.a' -delete; \
    find /opt/stack/lib -name 'libcusolverMg.so.*' -delete; \
    find /opt/stack/lib -name 'libnvrtc.alt.so.*' -delete

FROM interpreter AS frame
# A named volume takes over owner and mode of the folder it covers: whoever runs the image can cache bytecode there.
RUN install -d -m 1777 /pycache
# Compute and the management library, which tells the devices without starting CUDA; no graphics.
ENV PATH=/opt/stack/bin:$PATH PYTHONPYCACHEPREFIX=/pycache NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 4242:4242
WORKDIR /project
CMD ["python"]

FROM frame
COPY --from=build /opt/stack /opt/stack
