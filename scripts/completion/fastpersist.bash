# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# Completion of the command fastpersist for bash; sourced, or installed as
# share/bash-completion/completions/fastpersist.

_fastpersist() {
  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]}
  local words
  COMPREPLY=()
  if [[ $COMP_CWORD -eq 1 ]]; then
    words="inspect verify ls prune convert bench --help --version"
  else
    case $previous in
      --engine) words="auto uring libaio threads buffered" ;;
      --size | --rounds | --keep-last | --keep-every) return ;;
      *)
        case ${COMP_WORDS[1]} in
          inspect) words="--json --all --help" ;;
          verify) words="--quick --json --help" ;;
          ls) words="--json --help" ;;
          prune) words="--keep-last --keep-every --dry-run --json --help" ;;
          convert) words="--force --tensors-only --duplicate-shared --json --help" ;;
          bench) words="--size --rounds --engine --json --help" ;;
          *) return ;;
        esac
        if [[ $current != -* ]]; then
          local kind=-f
          [[ ${COMP_WORDS[1]} =~ ^(bench|ls|prune)$ ]] && kind=-d
          mapfile -t COMPREPLY < <(compgen "$kind" -- "$current")
          return
        fi
        ;;
    esac
  fi
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
}

complete -o filenames -F _fastpersist fastpersist
