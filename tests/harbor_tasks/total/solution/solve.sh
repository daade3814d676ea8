#!/bin/sh
. "$(dirname "$0")/adding.sh"
add numbers.txt > "$TARGET"
