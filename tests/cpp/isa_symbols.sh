#!/bin/sh
# isa_symbols.sh NM "object;object;...": every weak or global definition in src/cpu/isa_<set>.cpp's object names strobe::<set>.
nm=$1
found=0
status=0
for object in $(echo "$2" | tr ';' ' '); do
  set=$(echo "$object" | sed -n 's/.*isa_\([a-z0-9]*\)\.cpp\..*/\1/p')
  [ -n "$set" ] || continue
  found=$((found + 1))
  foreign=$("$nm" --defined-only --demangle "$object" | grep -E '^[0-9a-f]+ [WVTDBRu] ' | grep -v "strobe::$set::")
  if [ -n "$foreign" ]; then
    echo "isa_$set.cpp gives the linker code that is not its own:"
    echo "$foreign"
    status=1
  fi
done
[ "$found" -gt 0 ] || { echo "no object of an instruction set among: $2"; exit 1; }
exit $status
