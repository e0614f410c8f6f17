"""`ccl-search completion SHELL`: a script that completes commands, options and names."""

from __future__ import annotations

import argparse

from cclsearch.cli import COMMANDS, EXIT_OK, make_parser

EXAMPLE = 'eval "$(ccl-search completion bash)"    (zsh: the same; fish: ccl-search completion fish | source)'

BASH = """\
_ccl_search() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  if [[ $COMP_CWORD -eq 1 ]]; then
    COMPREPLY=($(compgen -W "{commands}" -- "$current")); return
  fi
  case "$before" in
    -w|--workload|-l|--launcher|-o|--objective)
      COMPREPLY=($(compgen -W "$(ccl-search completion --names="$before" 2>/dev/null)" -- "$current")); return;;
  esac
  if [[ "$current" == -* ]]; then
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    return
  fi
  COMPREPLY=($(compgen -W "$(ccl-search completion --names runs 2>/dev/null)" -f -- "$current"))
}}
complete -o default -F _ccl_search ccl-search
"""

NAMES = {
    "-w": ("workloads", ".yaml"),
    "--workload": ("workloads", ".yaml"),
    "-l": ("launchers", ".yaml"),
    "--launcher": ("launchers", ".yaml"),
    "-o": ("objectives", ".yaml"),
    "--objective": ("objectives", ".yaml"),
}
"""Option -> folder and suffix of the content that it names."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", nargs="?", choices=("bash", "zsh", "fish"), default="bash")
    parser.add_argument("--names", metavar="OPTION", help="print the names that an option takes (`runs` for runs)")


def run(args: argparse.Namespace) -> int:
    if args.names is not None:
        print("\n".join(list_names(args.names)))
    else:
        print(render_completion(args.shell))
    return EXIT_OK


def list_names(option: str) -> list[str]:
    """What may follow an option: names of content, or of runs."""
    from cclsearch.content import list_content
    from cclsearch.runs_folder import list_runs

    if option == "runs":
        return [folder.name for folder in list_runs()]
    if option not in NAMES:
        return []
    folder, suffix = NAMES[option]
    return [name for name in list_content(folder, suffix) if not name.endswith(".framework")]


def render_completion(shell: str) -> str:
    """The completion script of that shell."""
    options = {name: [o for action in make_parser(name)._actions for o in action.option_strings] for name in COMMANDS}
    if shell == "fish":
        return _render_fish(options)
    cases = "\n".join(
        f'      {name}) COMPREPLY=($(compgen -W "{" ".join(found)}" -- "$current"));;'
        for name, found in options.items()
    )
    script = BASH.format(commands=" ".join(COMMANDS), cases=cases)
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script


def _render_fish(options: dict[str, list[str]]) -> str:
    lines = ["complete -c ccl-search -f"]
    for name, found in options.items():
        summary = COMMANDS[name][1].replace("'", "\\'")
        lines.append(f"complete -c ccl-search -n __fish_use_subcommand -a {name} -d '{summary}'")
        for option in found:
            form = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            lines.append(f"complete -c ccl-search -n '__fish_seen_subcommand_from {name}' {form}")
    for option in ("--workload", "--launcher", "--objective"):
        lines.append(f"complete -c ccl-search -x -l {option[2:]} -a '(ccl-search completion --names={option})'")
    return "\n".join(lines) + "\n"
