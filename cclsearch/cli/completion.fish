function __ccl_search
  set -l before (commandline -opc)
  set -l found ($before[1] completion --words $before[2..-1] "$(commandline -ct)" 2>/dev/null)
  if test (count $found) -gt 0
    printf '%s\n' $found
  else
    __fish_complete_path (commandline -ct)
  end
end
complete -c ccl-search -f -a '(__ccl_search)'
