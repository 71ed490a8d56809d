# weightsmith on the CPU, without PyTorch:
#
#   docker build -t weightsmith .
#   docker run --rm -v "$PWD:/data" --user "$(id -u):$(id -g)" weightsmith merge recipe.yml merged
#
# EXTRAS are those of pyproject.toml: --build-arg EXTRAS=gguf,remote

FROM python:3.12-slim AS build
ARG EXTRAS=gguf
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY man ./man
COPY src ./src
RUN python -m venv /opt/weightsmith \
    && /opt/weightsmith/bin/pip install --no-cache-dir ".[${EXTRAS}]"

FROM python:3.12-slim
COPY --from=build /opt/weightsmith /opt/weightsmith
# The caches are writable for any user that --user names.
RUN useradd --create-home --uid 1000 weightsmith \
    && mkdir --mode 1777 /cache
ENV PATH=/opt/weightsmith/bin:$PATH \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface
USER weightsmith
WORKDIR /data
ENTRYPOINT ["weightsmith"]
CMD ["--help"]
