#!/usr/bin/env bash
# Set up and train:       ./run.sh [--option=value ...]     all options of train_gpt.py. NPROC=k sets the number of processes
# Set up and test:        ./run.sh test [pytest arguments]
# Set up and run a tool:  ./run.sh tools/replay.py --random=1
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"  # of `sh run.sh`
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)  # relative paths in options start in the current folder
if [[ ${1:-} == *.py && ! -e $root/$1 && -e $1 ]]; then  # a tool's path from the current folder, or its whole path
  tool=$(cd "$(dirname "$1")" && pwd)/${1##*/}
  set -- "${tool#"$root"/}" "${@:2}"
fi

# Waiting threads free their core after 1000 spins. glibc keeps freed activations for the next step
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000}
export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-1073741824}
export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-2147483647}

trap 'exit 130' INT  # also while a program runs that ends with another status

requirements=$root/requirements.txt packages=(numpy huggingface_hub tqdm)
case ${1:-} in
  test | benchmarks/gpu.py) requirements=$root/requirements-dev.txt packages+=(scipy matplotlib pytest xdist ruff triton) ;;
  tools/sample.py) ;;
  tools/*.py | benchmarks/*.py) requirements=$root/requirements-tools.txt packages+=(scipy matplotlib) ;;
esac

has_packages() {  # whether this is Python 3.11 or later with PyTorch 2.11 or later and the packages. Imports none
  "$1" -c 'import sys
from importlib import metadata, util
torch_version = tuple(int(part) for part in metadata.version("torch").split(".")[:2])
sys.exit(sys.version_info < (3, 11) or torch_version < (2, 11) or not all(map(util.find_spec, sys.argv[1:])))
' "${@:2}" >/dev/null 2>&1
}
has_module() {  # whether this is Python 3.11 or later with a module of the standard library, or pip
  "$1" -c 'import importlib, sys
importlib.import_module(sys.argv[1])
sys.exit(sys.version_info < (3, 11))' "$2" >/dev/null 2>&1
}
stop() {
  echo "run.sh: error: $1" >&2
  exit 2
}

venv=$root/.venv
if has_packages "$venv/bin/python" "${packages[@]}"; then
  python=$venv/bin/python
elif has_packages python3 "${packages[@]}"; then
  python=python3
else
  python=$venv/bin/python
  if [[ -e $venv || -L $venv ]]; then
    has_module "$python" pip || stop ".venv has no Python 3.11 or later with pip: remove .venv and start again"
  elif ! has_module python3 ensurepip; then  # Debian has it in another package
    stop "python3 is not Python 3.11 or later with venv: install it (on Debian also python3-venv)"
  fi
  echo "run.sh: setting up .venv from ${requirements##*/} (PyTorch is a large download, once)" >&2
  [[ -e $venv ]] || python3 -m venv --system-site-packages "$venv"  # uses the packages that python3 has
  "$python" -m pip install --quiet --disable-pip-version-check -r "$requirements"
fi
needs_corpus() {  # whether data/torch_source, the text of the small presets, is missing and may be read
  [[ ! -e $root/data/torch_source/corpus.json ]] || return 1
  case " $* " in
    *" -h "* | *" --help "* | *" --print_config "* | " data/"* | " benchmarks/compare_nanogpt.py "*) false ;;
    " test "* | " benchmarks/"* | " tools/compare.py "* | " tools/ladder.py "* | " tools/replay.py "*) true ;;
    *".py "*) false ;;
    *) [[ $("$python" "$root/train_gpt.py" "$@" --print_config 2>&1) == *train_files*data/torch_source/* ]] ;;
  esac
}
if needs_corpus "$@"; then
  echo "run.sh: making data/torch_source, the text of the small presets, from the installed PyTorch" >&2
  [[ -w $root/data ]] || stop "$root/data cannot be written: copy the project to a folder of your own"
  (cd "$root" && "$python" -c 'import runpy, sys
from tools.common import run_guarded
sys.exit(run_guarded(runpy.run_path("data/text.py")["make_embedded_corpus"]))')
fi

if [[ ${1:-} == test ]]; then
  cd "$root"
  if (($# > 1)); then time=""; else time=". All take about seven minutes on two cores"; fi
  echo "run.sh: pytest reads all tests before the first dot, which can take a minute$time" >&2
  exec "$python" -m pytest "${@:2}"
fi
export RUN_SH=$0  # printed commands start with it
if [[ $RUN_SH != */* ]]; then RUN_SH=./$RUN_SH; fi
if [[ ${1:-} == [^-]*.py ]]; then
  case ${1##*/} in  # names until 2026-11-29
    ablate.py | compare_scripts.py | cpu_ablation.py | rules.py) new=tools/compare.py ;;
    common.py | results.py | simulate_ranks.py) [[ ! -e $root/$1 ]] || stop "$1 has functions for the tools and runs nothing" ;;
    make_leaderboard.py | run_ladder.py) new=tools/${1##*_} ;;
    *) new=tools/${1##*/} ;;
  esac
  [[ -e $root/$1 || ! -e $root/$new ]] || stop "$1 is now $new"
  [[ -e $root/$1 ]] || stop "$1 is no tool of this project"
  exec "$python" "$root/$1" "${@:2}"
fi
[[ ${1:-} != [^-]* ]] || stop "$1: give test, a tool such as tools/plot.py, or options such as --preset=laptop"
if [[ -z ${NPROC:-} ]]; then  # the visible CUDA devices, rounded down to a power of two, at most 8. One process without CUDA
  NPROC=$("$python" -c 'import torch; n = min(torch.cuda.device_count(), 8); print(1 << max(n.bit_length() - 1, 0))' 2>/dev/null) ||
    stop "$python cannot load PyTorch, or was interrupted"
fi
[[ $NPROC =~ ^[1-9][0-9]*$ ]] || stop "NPROC=$NPROC: give the number of processes, 1 or more"
case " $* " in *" -h "* | *" --help "*) NPROC=1 ;; esac  # torchrun would print it once for each process
if [[ $NPROC == 1 ]]; then
  exec "$python" "$root/train_gpt.py" "$@"
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # torchrun's default, without its warning
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1  # torchrun hands these on, if it can
torchrun='import logging, sys
from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException, errors
logging.disable(logging.ERROR)  # its lines beside the one of the run
try: run.main()
except errors.ChildFailedError as error:  # ends with the status of the run, without the traceback of torchrun
    rank, failure = error.get_first_failure()
    code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    if code != 2: print(f"run.sh: rank {rank} ended first, with status {code}", file=sys.stderr)
    sys.exit(code)
except SignalException as error:
    sys.exit(128 + error.sigval)'
exec "$python" -c "$torchrun" --standalone --local-addr=127.0.0.1 --nproc_per_node="$NPROC" "$root/train_gpt.py" "$@"
