#!/bin/sh
for file in *.txt; do mv "$file" "${file%.txt}.md"; done
