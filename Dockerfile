# The server in a container. Not built yet where this was written; checked by hadolint.
#
#   docker build -t nanoengine .                        # for a CPU
#   docker build -t nanoengine --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#   docker run --rm -p 8000:8000 nanoengine             # the bundled model; with a GPU: --gpus all
#   docker run --rm -p 8000:8000 -v ~/.cache/huggingface:/home/serve/.cache/huggingface nanoengine Qwen/Qwen3-0.6B
FROM python:3.12-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# The CPU's kernels, and Triton's launcher, are compiled where they run.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 serve

COPY . /source
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" "/source[serve,structured]"

USER 1000
WORKDIR /home/serve
EXPOSE 8000
ENTRYPOINT ["nanoengine", "serve", "--host", "0.0.0.0"]
CMD ["demo"]
