_ccl_search() {
  local -a found
  found=("${(@f)$("${words[1]/#\~/$HOME}" completion --words "${(@Q)words[2,CURRENT]}" 2>/dev/null)}")
  if [[ -n "$found" ]]; then compadd -- "${found[@]}"; else _files; fi
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _ccl_search ccl-search
