# The sidecar and the command, without torch and without vLLM. Needs no writable root: what it
# writes goes to /tmp, /stage and the mounted registry.
#   docker build -t lora-fs .
#   docker run --read-only --tmpfs /tmp -v "$PWD/adapters:/adapters" lora-fs \
#     --root /adapters --model Qwen/Qwen2.5-7B list
#
# For a release: the base by the digest that you tested, what is in the image (SBOM), and how it came to be.
#   docker buildx build --sbom=true --provenance=mode=max --build-arg REVISION="$(git rev-parse HEAD)" \
#     --build-arg PYTHON=python:3.11-slim@sha256:DIGEST --tag REGISTRY/lora-fs:0.1.0 --push .
ARG PYTHON=python:3.11-slim

FROM ${PYTHON} AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY schemas schemas
COPY sidecar sidecar
COPY worker_patch worker_patch
COPY kernels kernels
COPY examples/local examples/local
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .
# Sources of adapters besides the hub and web servers, signatures, and traces: --build-arg EXTRAS=s3,gcs,sign,otel
ARG EXTRAS=
# The lists only constrain here: the wheel's own requirements are installed, at tested versions.
RUN python -m venv /opt/lora-fs \
    && /opt/lora-fs/bin/pip install --no-cache-dir \
        -c requirements/engine.txt -c requirements/dev.txt "$(echo /wheels/*.whl)${EXTRAS:+[$EXTRAS]}" \
    && /opt/lora-fs/bin/pip uninstall --yes pip

FROM ${PYTHON}
ARG PYTHON
ARG REVISION=
LABEL org.opencontainers.image.title="lora-fs" \
      org.opencontainers.image.description="LoRA adapters from a shared volume, served by vLLM" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${PYTHON}" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --system --uid 10001 --user-group --no-create-home --home-dir /tmp lora-fs \
    # Group 0: a user that a cluster chose, as OpenShift does, is in it.
    && install --directory --owner=10001 --group=0 --mode=0775 /stage
COPY --from=build /opt/lora-fs /opt/lora-fs
ENV PATH="/opt/lora-fs/bin:${PATH}" \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    LORA_FS_PORT=8001 \
    LORA_FS_STAGE_DIR=/stage
# By number, so that Kubernetes can see that it is not root.
USER 10001:10001
EXPOSE 8001
# No curl in the image. bash asks by itself, past any proxy, in 3 ms of a core; a Python takes 100 ms, every 10 s.
# A gateway answers 503 while no replica is ready, and waits for one.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s --retries=3 \
    CMD ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/${LORA_FS_PORT:-8001} && printf 'GET /health HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\nConnection: close\\r\\n\\r\\n' >&3 && read -r -t 3 _ status _ <&3 && [[ $status = 200 || $status = 503 ]]"]
ENTRYPOINT ["lora-fs"]
CMD ["sidecar"]
