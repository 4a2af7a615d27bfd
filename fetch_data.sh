#!/usr/bin/env bash
# fetch_data.sh: bring text to train on into data/, which git ignores.  `./fetch_data.sh --help` says what there is.
#
# What is fetched goes to data/NAME.part first and gets its own name only once it is whole and looks like what was asked
# for, so a file in data/ is never half a file.  Run again, it goes on where it was interrupted, and fetches nothing
# that is there.
#
# Read before it: nothing.  What it does not do: no filtering of what a text says.
set -euo pipefail
cd "$(dirname "$0")"

# From the environment: another address to fetch from, such as a mirror; and how many seconds one file may take.
TINY_URL=${TINY_URL:-https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt}
FETCH_TIMEOUT=${FETCH_TIMEOUT:-600}

AGENT="NanoEuler-fetch_data.sh/1.0 (a language model for teaching; fetches a few public text files)"

usage() {
    cat <<EOF
usage: ./fetch_data.sh WORD...
  tiny    Tiny Shakespeare, scenes from the plays, 1.1 MB, public domain -> data/tiny.txt

environment: TINY_URL (where tiny comes from), FETCH_TIMEOUT (seconds a file may take, now $FETCH_TIMEOUT)
EOF
}

fail() {
    echo "error: $*" >&2
    exit 2
}

# download URL PART: the whole of URL into PART, going on where an earlier try ended.
download() {
    local url=$1 part=$2 message code=0
    message=$(curl --silent --show-error --fail --location --user-agent "$AGENT" --connect-timeout 20 \
                   --max-time "$FETCH_TIMEOUT" --continue-at - --output "$part" "$url" 2>&1) || code=$?
    message=${message##*curl: }                 # "curl: (6) Could not resolve host: ..." -> what comes after the number
    message=${message#(*) }
    case "$code:$message" in
        0:*) ;;
        33:* | 22:*416*)
            # The server cannot resume, or has nothing after what we have: start anew.  Without a PART it is neither.
            [ -s "$part" ] || fail "$url cannot be fetched ($message)."
            rm -f "$part"
            download "$url" "$part" ;;
        22:*) fail "$url cannot be fetched ($message); see whether that address is still right." ;;
        *) fail "$url cannot be fetched ($message); run this again to go on when the network is back." ;;
    esac
}

# fetch URL FILE LEAST: make FILE from URL, unless it is there; an answer below LEAST bytes, or a web page, is refused.
fetch() {
    local url=$1 file=$2 least=$3 part=$2.part size
    if [ -s "$file" ]; then
        echo "$file is there ($(($(wc -c <"$file"))) bytes); nothing to fetch."
        return
    fi
    { mkdir -p data && touch "$part"; } 2>/dev/null || fail "data/ cannot be written to."
    [ -s "$part" ] || rm -f "$part"
    echo "Fetching $file ..."
    download "$url" "$part"
    size=$(($(wc -c <"$part")))
    if head -c 512 "$part" | LC_ALL=C grep -aqiE '^[[:space:]]*<(!doctype|html|head|\?xml)'; then
        rm -f "$part"
        fail "$url gave a web page instead of the text (a login page of the network, perhaps); nothing was kept."
    fi
    if [ "$size" -lt "$least" ]; then
        rm -f "$part"
        fail "$url gave $size bytes, fewer than the $least that $file must have; nothing was kept."
    fi
    mv "$part" "$file"
    echo "$file: $size bytes."
}

case "${1:-}" in
    "") usage >&2; exit 2 ;;
    -h | --help) usage; exit 0 ;;
esac
command -v curl >/dev/null || fail "curl is missing; install it (Debian, Ubuntu: apt install curl)."
case "$FETCH_TIMEOUT" in
    *[!0-9]* | 0*) fail "FETCH_TIMEOUT must be a whole number of seconds, at least 1, not '$FETCH_TIMEOUT'." ;;
esac
for word in "$@"; do                            # nothing is fetched if one word is wrong
    case "$word" in
        tiny) ;;
        *) fail "there is no corpus '$word'; ./fetch_data.sh --help lists what there is." ;;
    esac
done
for word in "$@"; do
    case "$word" in
        tiny) fetch "$TINY_URL" data/tiny.txt 500000 ;;
    esac
done
