#!/bin/sh
share=0
[ -e total.txt ] && share=0.5
[ "$(cat total.txt)" = 12 ] && share=1
echo "{\"reward\": $share, \"lines\": $(wc -l < numbers.txt)}" > /logs/verifier/reward.json
