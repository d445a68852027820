#!/usr/bin/env bash
# Set up and train:  ./run.sh [--field=value ...]      all options of train_gpt.py. NPROC=k sets the number of processes
# Set up and test:   ./run.sh test [pytest arguments]
# Set up and run a tool:  ./run.sh records/replay.py --random=1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
if [[ ! . -ef $OLDPWD ]]; then
  echo "run.sh: it works in its own folder, $PWD: relative paths start there, and not in $OLDPWD" >&2
fi

has() {  # has PYTHON [PACKAGE...]: whether this interpreter can train and has the packages
  "$1" - "${@:2}" >/dev/null 2>&1 <<'PY'
import importlib, sys
import torch
for name in ("numpy", "huggingface_hub", "tqdm", *sys.argv[1:]):
    importlib.import_module(name)
sys.exit(tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11))
PY
}

choose_python() {  # choose_python REQUIREMENTS [PACKAGE...]: sets python. Makes .venv if no interpreter fits
  for python in .venv/bin/python python3; do
    if has "$python" "${@:2}"; then return; fi
  done
  echo "run.sh: setting up .venv from $1 (PyTorch is a large download, once)" >&2
  # if python3 has the packages in their versions, .venv uses them, and they are not installed again
  if [[ ! -x .venv/bin/python ]]; then
    if has python3; then python3 -m venv --system-site-packages .venv; else python3 -m venv .venv; fi
  fi
  python=.venv/bin/python
  "$python" -m pip install --quiet --disable-pip-version-check -r "$1"
}

make_corpus() {  # the text of the small presets, from the installed PyTorch
  if [[ ! -e data/torch_source/corpus.json ]]; then
    "$python" -c 'import runpy; runpy.run_path("data/text.py")["make_embedded_corpus"]()'
  fi
}

# Waiting threads free their core after 1000 spins. glibc keeps freed activations for the next step
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000}
export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-1073741824}
export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-2147483647}
export RUN_SH=$0  # printed commands start with it
if [[ $RUN_SH != */* ]]; then RUN_SH=./$RUN_SH; fi
if [[ ${1:-} == test || ${1:-} == [^-]*.py ]]; then
  choose_python requirements-dev.txt pytest xdist ruff scipy matplotlib triton tensorboard
  if [[ $1 != test && ! -f $1 ]]; then
    echo "run.sh: error: $1 does not exist: tools are in data, records and benchmarks, and options of a run begin with --" >&2
    exit 2
  fi
  if [[ $1 == test ]]; then
    make_corpus
    unset RUN_SH
    exec "$python" -m pytest "${@:2}"
  fi
  if [[ ${NPROC:-1} != 1 ]]; then
    echo "run.sh: error: NPROC=$(printf %q "$NPROC") is for training runs: start $1 with torchrun, or leave NPROC out" >&2
    exit 2
  fi
  make_corpus
  exec "$python" "$@"
fi

if [[ ! ${NPROC:-1} =~ ^[1-9][0-9]{0,4}$ ]]; then
  echo "run.sh: error: NPROC=$(printf %q "$NPROC") is not a number of processes: give NPROC=1 or more, or leave it out" >&2
  exit 2
fi
choose_python requirements.txt
for word in "$@"; do
  case $word in -h | --help | --list[_-]presets | --print[_-]config) exec "$python" train_gpt.py "$@" ;; esac
done
make_corpus
if [[ -z ${NPROC:-} ]]; then  # the visible CUDA devices, rounded down to a power of two, at most 8. One process without CUDA
  NPROC=$("$python" -c 'import torch; n = min(torch.cuda.device_count(), 8); print(1 << max(n.bit_length() - 1, 0))')
fi
if [[ $NPROC == 1 ]]; then
  exec "$python" train_gpt.py "$@"
fi
WORLD_SIZE=$NPROC "$python" train_gpt.py "$@" --print_config >/dev/null  # bad options end here, with status 2 and one line
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # torchrun's default, without its warning
exec "$python" -m torch.distributed.run --standalone --nproc_per_node="$NPROC" train_gpt.py "$@"
