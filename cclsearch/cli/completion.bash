_ccl_search() {
  local IFS=$'\n'
  COMPREPLY=($("${COMP_WORDS[0]/#\~/$HOME}" completion --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _ccl_search ccl-search
