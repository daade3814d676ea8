#!/bin/sh
echo hello > greeting.txt
