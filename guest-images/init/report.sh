#!/bin/sh
# report NAME=VALUE...: one line `WONTON {json}` on stdout. Numbers, true and false go bare.
line=
for pair in "$@"; do
    name=${pair%%=*} value=${pair#*=}
    case $value in
        true | false | 0 | [1-9]) ;;
        *[!0-9.]* | '' | .* | *. | *.*.* | 0[0-9]*)
            value=$(printf '%s' "$value" | tr '\n\t' '  ' | sed 's/\\/\\\\/g; s/"/\\"/g')
            value="\"$value\""
            ;;
    esac
    line="$line,\"$name\":$value"
done
echo "WONTON {${line#,}}"
