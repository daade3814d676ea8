#!/bin/sh
if [ "$(cat greeting.txt)" = "$WORD" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
