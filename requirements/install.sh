#!/usr/bin/env bash
# Makes the Python environment of rlinf_vl. Run it again at any time: it does nothing where nothing changed.
set -euo pipefail

TORCH_DEFAULT=2.13.0
SGLANG_DEFAULT=0.5.23 # and none before it: rlinf_vl/engines/sglang/machine.py says why
CUDA_DRIVER=580 # the oldest NVIDIA driver for CUDA 13, which SGLang's wheels are built with
here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
root="$(dirname -- "$here")"

usage() {
    cat <<EOF
usage: bash requirements/install.sh [--sglang [VERSION]] [--torch VERSION] [--transformers VERSION] [--dev] [--venv DIR]

  --sglang [VERSION]      with the SGLang engine (default $SGLANG_DEFAULT), whose pins choose torch and transformers
  --torch VERSION         torch of this version (default $TORCH_DEFAULT)
  --transformers VERSION  transformers of this version (default: the newest that requirements/base.txt allows)
  --dev                   with what the tests need
  --venv DIR              where to make it (default .venv in the repository; with --sglang .venv-sglang)

An environment remembers what it was made with: a later call need not repeat the options.
Environment variables: PYTHON (the interpreter to make it with, 3.11 or newer), TORCH_INDEX_URL (where torch comes
from, such as https://download.pytorch.org/whl/cpu or …/whl/cu126), and pip's own.
EOF
}
fail() { printf 'install.sh: %s\n' "$*" >&2; exit 1; }
misuse() { printf 'install.sh: %s\n\n' "$*" >&2; usage >&2; exit 2; }
say() { printf '[install] %s\n' "$*"; }

with_sglang="" sglang="" torch="" transformers="" dev="" venv=""
while (($#)); do
    case "$1" in
        --sglang)
            with_sglang=1
            if [[ "${2:-}" =~ ^[0-9] ]]; then sglang="$2"; shift; fi ;;
        --torch | --transformers)
            [[ "${2:-}" =~ ^[0-9] ]] || misuse "$1 needs a version, such as 2.13.0; got '${2:-}'"
            if [[ "$1" == --torch ]]; then torch="$2"; else transformers="$2"; fi
            shift ;;
        --dev) dev=1 ;;
        --venv)
            [[ -n "${2:-}" && "$2" != -* ]] || misuse "--venv needs a folder"
            venv="$2"; shift ;;
        -h | --help) usage; exit 0 ;;
        *) misuse "unknown option '$1'" ;;
    esac
    shift
done
if [[ -z "$venv" ]]; then
    venv="$root/.venv${with_sglang:+-sglang}"
else
    mkdir -p -- "$(dirname -- "$venv")"
    venv="$(cd -- "$(dirname -- "$venv")" && pwd)/$(basename -- "$venv")"
fi
python="$venv/bin/python"
stamp="$venv/.rlinf_vl" # written last: what was asked for, the versions that came of it, and a hash of all that went in

# What an earlier, finished run was asked for stands until something else is asked for.
remembered() { [[ ! -f "$stamp" ]] || sed -n "s/^$1=//p" "$stamp"; }
recall() {
    with_sglang="${with_sglang:-$(remembered with_sglang)}"
    sglang="${sglang:-$(remembered sglang)}"
    torch="${torch:-$(remembered torch)}"
    transformers="${transformers:-$(remembered transformers)}"
    dev="${dev:-$(remembered dev)}"
    inputs=("$here/install.sh" "$here/base.txt" "$root/pyproject.toml" "$root/rlinf_vl/tools/check/packages.py")
    if [[ -n "$dev" ]]; then inputs+=("$here/dev.txt"); fi
    key="$({ cat -- "${inputs[@]}"; printf '%s\n' "$root" "$with_sglang" "$sglang" "$torch" "$transformers" "$dev"; } |
        { sha256sum 2>/dev/null || shasum -a 256; } | cut -d ' ' -f 1)"
}

# Prints what is there. `quick` looks at installed metadata only; `full` imports what a run imports, which takes seconds. Python
# compiles files as they are imported, and keeps that, so packages are installed uncompiled: most files are never imported.
verify() {
    env -u PYTHONDONTWRITEBYTECODE "$python" - "$1" "$root" "$with_sglang" "$dev" <<'EOF'
import importlib, importlib.metadata as metadata, importlib.util, pathlib, runpy, shutil, subprocess, sys

how, root, sglang, dev = sys.argv[1:]
sys.path.pop(0)  # the current folder must not pass for an installed package
modules = {
    "torch": "torch", "transformers": "transformers", "ray": "ray", "datasets": "datasets", "hydra-core": "hydra",
    "numpy": "numpy", "pillow": "PIL", "safetensors": "safetensors", "tensorboard": "tensorboard",
    "math-verify": "math_verify", "rlinf_vl": "rlinf_vl",
}
if sglang:
    modules["sglang"] = None  # importing it may need a GPU
if dev:
    modules["pytest"] = "pytest"
versions = {}
for name, module in modules.items():
    versions[name] = metadata.version(name)
    if module and importlib.util.find_spec(module) is None:
        sys.exit(f"{name} {versions[name]} is installed, but there is no module {module}")
    if module and how == "full":
        importlib.import_module(module)
location = pathlib.Path(importlib.util.find_spec("rlinf_vl").submodule_search_locations[0]).resolve()
if location.parent != pathlib.Path(root).resolve():
    sys.exit(f"rlinf_vl is installed from {location.parent}, not from {root}")
if how == "full":
    for module in ("actor.worker", "rollout.pool.worker", "driver.supervise", "extras.toy.warm_start", "tools.report.build"):
        importlib.import_module(f"rlinf_vl.{module}")
gpus = 0
if shutil.which("nvidia-smi"):
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    gpus = sum(line.startswith("GPU ") for line in listed.splitlines())
if how == "full":
    import torch
    built, visible = torch.version.cuda, torch.cuda.is_available()
else:
    package = importlib.util.find_spec("torch").submodule_search_locations[0]
    built = runpy.run_path(f"{package}/version.py")["cuda"]
    visible = bool(built and gpus)
cuda = f"CUDA {built}, {gpus} GPU(s) visible" if visible else "no CUDA device visible"
print(f"[install] python {sys.version.split()[0]}, torch {versions.pop('torch')} ({cuda})")
print("[install] " + ", ".join(f"{name} {version}" for name, version in versions.items()))
if gpus and not visible:
    print("[install] warning: this machine has an NVIDIA GPU that this torch cannot use. " + (
        "SGLang needs CUDA 13: update the driver" if sglang else "Delete the environment and name a\n"
        "[install]   build that fits the driver, such as TORCH_INDEX_URL=https://download.pytorch.org/whl/cu126"))
EOF
}

packages() { "$python" -P "$root/rlinf_vl/tools/check/packages.py" "$1" "$stamp"; }
# Prints the packages that some other pip has moved since: name, recorded version, installed version.
moved() { if [[ -x "$python" ]]; then packages moved 2>/dev/null || true; fi; }
up_to_date() {
    recall
    [[ "$(remembered key)" == "$key" && -z "$(moved)" ]] && verify quick 2>/dev/null
}
if up_to_date; then
    say "nothing to do: $venv is up to date"
    exit 0
fi

if [[ -n "$with_sglang" ]]; then
    if [[ "$(printf '%s\n' "$SGLANG_DEFAULT" "${sglang:-$SGLANG_DEFAULT}" | sort -V | head -n 1)" != "$SGLANG_DEFAULT" ]]; then
        fail "SGLang $sglang is too old; --sglang $SGLANG_DEFAULT is the oldest that works"
    fi
    driver=""
    if command -v nvidia-smi >/dev/null; then
        driver="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)"
    fi
    if [[ "$driver" =~ ^([0-9]+)\. ]] && ((BASH_REMATCH[1] < CUDA_DRIVER)); then
        fail "NVIDIA driver $driver is too old for SGLang $SGLANG_DEFAULT, which needs CUDA 13: update it to $CUDA_DRIVER or" \
            "newer, or use rollout.rollout_backend=torch, for which 'bash requirements/install.sh' makes an environment"
    fi
fi

# From here on one process at a time; the others wait, and then find nothing to do.
if command -v flock >/dev/null; then
    exec 9>"$venv.lock"
    if ! flock --nonblock 9; then
        say "waiting for another install into $venv"
        flock 9
        if up_to_date; then exit 0; fi
    fi
fi
say "making $venv (first time: a few minutes and 2 GB; more with CUDA or SGLang)"
# Asked for what it was made for, an environment gets the versions back that it was made with.
restore=()
torch_was=""
if [[ "$(remembered key)" == "$key" || "$(remembered begun)" == "$key" ]]; then
    while read -r name was now; do
        if [[ -z "$name" ]]; then continue; fi
        say "moved since it was made: $name $was -> $now"
        if [[ "$name" == torch ]]; then torch_was="$was"; fi
        if [[ "$name" != torchvision && "$was" != none ]]; then restore+=("$name==$was"); fi
    done <<<"$(moved)"
fi
if [[ -f "$stamp" ]]; then # no longer a finished environment, but what it was made with stays known
    sed -e '/^begun=/d' -e "s/^key=/begun=/" "$stamp" >"$stamp.new"
    mv -- "$stamp.new" "$stamp"
fi
if [[ "$torch_was" == *+* && -z "${TORCH_INDEX_URL:-}" ]]; then # the build that was there, not PyPI's
    TORCH_INDEX_URL="https://download.pytorch.org/whl/${torch_was#*+}"
fi

usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
find_python() {
    local candidate
    if [[ -n "${PYTHON:-}" ]]; then
        usable "$PYTHON" || fail "PYTHON=$PYTHON is no Python 3.11 or newer with the venv module"
        printf '%s' "$PYTHON"
        return
    fi
    for candidate in python3.12 python3.11 python3; do
        if usable "$candidate"; then printf '%s' "$candidate"; return; fi
    done
    fail "needs Python 3.11 or newer with the venv module (Debian and Ubuntu: apt install python3-venv); none of" \
        "python3.12, python3.11, python3 is one; name yours with PYTHON=/path/to/python"
}
if ! "$python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    if [[ -e "$venv" && ! -f "$venv/pyvenv.cfg" && -n "$(ls -A -- "$venv")" ]]; then
        fail "$venv exists and is no Python environment; name another folder, or remove it"
    fi
    base="$(find_python)"
    if [[ -e "$venv" ]]; then say "$venv is incomplete: making it anew"; fi
    "$base" -m venv --clear -- "$venv"
fi
say "$("$python" --version) in $venv"

# uv takes a third of pip's time for many packages. It does not know pip's settings: where those name the only place that
# packages may come from, and where uv can't be had or fails, pip installs them.
uv=""
find_uv() {
    if "$python" -m pip config list 2>/dev/null | grep -qE '\.(index-url|no-index|proxy|trusted-host|client-cert)='; then return; fi
    "$python" -m pip install -qq --no-compile --disable-pip-version-check uv 2>/dev/null || return 0
    uv="$venv/bin/uv"
}
by_uv() {
    if [[ -z "$uv" ]]; then return 1; fi
    UV_SYSTEM_CERTS=1 "$uv" pip install -q --python "$python" "$@" && return
    say "  uv could not (its message is above): asking pip"
    return 1
}
install_packages() { # WHAT ARGUMENT…: quiet but for errors
    local what="$1" start="$SECONDS"
    shift
    say "installing $what …"
    by_uv "$@" || "$python" -m pip install -qq --no-compile --disable-pip-version-check "$@" ||
        fail "could not install $what (pip's message is above); run this again"
    say "  done in $((SECONDS - start)) s"
}

# Of use beside rlinf_vl, to load what it exports with AutoProcessor. It must be built for this torch, or transformers
# can't be imported any more; and there is no such build for every torch. It is looked for while the others are installed.
torchvision_pid="" torchvision=()
begin_torchvision() {
    local argument
    while read -r argument; do
        if [[ -n "$argument" ]]; then torchvision+=("$argument"); fi
    done <<<"$(packages torchvision)"
    if ((${#torchvision[@]} == 0)); then return; fi
    say "looking for a torchvision for this torch, beside the rest …"
    "$python" -m pip -qq --disable-pip-version-check --retries 0 --timeout 20 "${torchvision[@]}" >/dev/null 2>&1 &
    torchvision_pid=$!
}
end_torchvision() {
    if wait "$torchvision_pid" && "$python" -P -c 'import torchvision' 2>/dev/null; then return; fi
    "$python" -m pip uninstall -qq --yes --disable-pip-version-check torchvision 2>/dev/null || true
    say "none for this torch can be had here, which rlinf_vl does without; AutoProcessor (videos) wants it:"
    say "  $python -m pip ${torchvision[*]:0:${#torchvision[@]}-1} '${torchvision[${#torchvision[@]}-1]}'"
}

wanted=() # in one call with the requirements, so that their installer sees every constraint at once
if [[ -n "$transformers" ]]; then wanted+=("transformers==$transformers"); fi
if [[ -n "$with_sglang" ]]; then
    wanted+=("sglang==${sglang:-$SGLANG_DEFAULT}")
    if [[ -n "$torch" ]]; then wanted+=("torch==$torch"); fi
    if [[ -n "${TORCH_INDEX_URL:-}" ]]; then wanted+=(--extra-index-url "$TORCH_INDEX_URL"); fi
else
    if [[ -z "${TORCH_INDEX_URL:-}" ]] && ! command -v nvidia-smi >/dev/null; then
        say "no NVIDIA GPU here. If this fetches gigabytes of CUDA packages, this spares them:"
        say "  TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu bash requirements/install.sh"
    fi
    torch_version="${torch_was:-${torch:-$TORCH_DEFAULT}}"
    install_packages "torch $torch_version" "torch==$torch_version" ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"}
    wanted+=("torch==$torch_version") # and nothing below may move it
    begin_torchvision # SGLang brings its own
fi
if [[ -n "$dev" ]]; then wanted+=(-r "$here/dev.txt"); fi
if [[ -z "$with_sglang" ]]; then find_uv; fi # SGLang depends on pre-releases, which pip finds by itself
install_packages "the requirements${with_sglang:+ with SGLang ${sglang:-$SGLANG_DEFAULT}}${dev:+ and the test tools}" \
    -r "$here/base.txt" "${wanted[@]}" ${restore[@]+"${restore[@]}"}
install_packages "rlinf_vl (editable)" --no-deps -e "$root"

if [[ -n "$torchvision_pid" ]]; then end_torchvision; fi

say "verifying (imports everything once) …"
verify full || fail "the environment does not work (message above); run this again, or delete $venv first"
{
    printf 'key=%s\nwith_sglang=%s\nsglang=%s\n' "$key" "$with_sglang" "$sglang"
    printf 'torch=%s\ntransformers=%s\ndev=%s\n' "$torch" "$transformers" "$dev"
    packages record
} >"$stamp.new"
mv -- "$stamp.new" "$stamp"
say "ready in $SECONDS s: $venv"
