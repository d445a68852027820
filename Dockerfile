# A reproducible environment for train_gpt.py. Build and run:
#   docker build -t train_gpt .
#   docker run --gpus all --ipc=host --user "$(id -u):$(id -g)" -v "$PWD":/workspace train_gpt ./run.sh
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# gcc and the Python headers are for torch.compile, which builds its kernel launchers on first use
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ git libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# a separate layer, so a change of the code does not install PyTorch again
COPY requirements.txt requirements-tools.txt requirements-dev.txt /opt/
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --requirement /opt/requirements-dev.txt
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1

# for any user id: compilers keep their caches under HOME and look up the name in USER
ENV HOME=/tmp USER=trainer
RUN useradd --uid 10001 trainer
USER 10001
WORKDIR /workspace
COPY --chown=trainer . .

CMD ["./run.sh"]
