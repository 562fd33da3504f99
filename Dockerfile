# The sidecar and the command, without torch and without vLLM. Needs no writable root: what it
# writes goes to /tmp, /stage and the mounted registry.
#   docker build -t lora-fs .
#   docker run --read-only --tmpfs /tmp -v "$PWD/adapters:/adapters" lora-fs \
#     --root /adapters --model Qwen/Qwen2.5-7B list

FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY schemas schemas
COPY sidecar sidecar
COPY worker_patch worker_patch
COPY kernels kernels
COPY examples/local examples/local
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .
# Sources of adapters besides the hub and web servers, and traces: --build-arg EXTRAS=s3,gcs,otel
ARG EXTRAS=
# The lists only constrain here: the wheel's own requirements are installed, at tested versions.
RUN python -m venv /opt/lora-fs \
    && /opt/lora-fs/bin/pip install --no-cache-dir \
        -c requirements/engine.txt -c requirements/dev.txt "$(echo /wheels/*.whl)${EXTRAS:+[$EXTRAS]}" \
    && /opt/lora-fs/bin/pip uninstall --yes pip

FROM python:3.11-slim
LABEL org.opencontainers.image.title="lora-fs" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --system --uid 10001 --user-group --no-create-home --home-dir /tmp lora-fs \
    && install --directory --owner=10001 --group=10001 --mode=0755 /stage
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
# No curl in the image; no proxy either, whatever http_proxy says. An HTTP error raises.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:' + os.environ.get('LORA_FS_PORT', '8001') + '/health', timeout=3)"]
ENTRYPOINT ["lora-fs"]
CMD ["sidecar"]
