#!/usr/bin/env bash
# fetch_data.sh: bring text to train on into data/, and a model to talk to into out/; git ignores both.
# `./fetch_data.sh --help` says what there is.
#
# Whatever is fetched or made goes to NAME.part first and gets its own name only once it is whole and looks
# like what was asked for, so a file is never half a file.  Run again, it goes on where it was interrupted,
# and fetches nothing that is there.  It asks for one thing at a time, pauses between books, and stops at the
# first sign that the network is gone or that a server wants to be left alone.
#
# Read before it: nothing.  What it does not do: no judgement of what a text says, and no removal of
# duplicates.  It is plain bash (3.2, as macOS has it, is enough) with curl, awk and iconv; web text also
# needs DuckDB's command line.
#
#   1. settings        what can be changed from the environment, --help, one run at a time
#   2. fetching        one file from one address: resumed, checked, renamed
#   3. books           Project Gutenberg: the licence stripped, lines joined to paragraphs, one file of all
#   4. web             FineWeb-Edu: rows of Parquet files filtered by DuckDB into text
#   5. a model         SmolLM2-135M-Instruct: its files checked as JSON and as safetensors
#   6. the command line
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "$0")"
export LC_ALL=C                         # bytes, whatever the user's language: the same file for everybody

# ------------------------------------------------------------------------------------------------------------
# 1. Settings
# ------------------------------------------------------------------------------------------------------------
# Where things come from: another address can stand in, such as a mirror.
GITHUB=https://raw.githubusercontent.com
TINY_URL=${TINY_URL:-$GITHUB/karpathy/char-rnn/master/data/tinyshakespeare/input.txt}
ALPACA_URL=${ALPACA_URL:-$GITHUB/tatsu-lab/stanford_alpaca/main/alpaca_data.json}
GUTENBERG_URL=${GUTENBERG_URL:-https://www.gutenberg.org/cache/epub}
HUGGING_FACE=https://huggingface.co
FINEWEB_URL=${FINEWEB_URL:-$HUGGING_FACE/datasets/HuggingFaceFW/fineweb-edu/resolve/main/sample/10BT}
SMOLLM2_URL=${SMOLLM2_URL:-$HUGGING_FACE/HuggingFaceTB/SmolLM2-135M-Instruct/resolve/main}

BOOK_IDS=${BOOK_IDS:-}                  # empty: the list below
FETCH_TIMEOUT=${FETCH_TIMEOUT:-7200}    # for one file; a connection that stalls for a minute ends sooner
FETCH_PAUSE=${FETCH_PAUSE:-2}           # what Project Gutenberg asks of programs

# 2 GB of English is about 600 million tokens of a vocabulary of 4,096 (3.3 bytes each).  Four epochs of them,
# which are about as good as new text (Muennighoff et al., 2023), are 20 a parameter of the big model
# (Hoffmann et al., 2022).
WEB_MB=${WEB_MB:-2000}
# FineWeb-Edu rates how much a page teaches, from 0 to 5, and keeps what rounds to 3; from 3.0 on it is about
# the better half of that.
WEB_SCORE=${WEB_SCORE:-3}
# How sure a classifier is that a page is English.  FineWeb keeps 0.65 and above; below 0.8 a page may be half
# another language, or lists and tables.
WEB_LANGUAGE_SCORE=${WEB_LANGUAGE_SCORE:-0.8}

AGENT="NanoEuler-fetch_data.sh/1.0 (a language model for teaching; fetches a few public text files)"

usage() {
    cat <<EOT
usage: ./fetch_data.sh WORD...
  tiny          Tiny Shakespeare: scenes from the plays, 1.1 MB -> data/tiny.txt
                (public domain)
  books         $(list_books | wc -l | tr -d ' ') classics, 110 MB in 10 minutes -> data/books.txt
                (Project Gutenberg; public domain in the USA, elsewhere see the law of your country)
  web           pages of FineWeb-Edu's sample-10BT, WEB_MB megabytes -> data/web_000.txt, web_001.txt, ...
                (ODC-By 1.0, and Common Crawl's terms of use; about 1.3 MB are read for 1 MB of text)
  instructions  Alpaca's 52,002 instructions with answers, 23 MB -> data/instructions.json
                (CC BY-NC 4.0: not for commercial use)
  smollm2       SmolLM2-135M-Instruct, a model to talk to, 270 MB -> out/smollm2/
                (Apache 2.0; then python chat.py --model out/smollm2; tried with a stand-in for its server)
  all           books, web and instructions; not smollm2, which is a model and no data

Sizes and times are estimates.  Run again it fetches only what is missing, such as a book that the server did
not have: as long as nine of ten are there, data/books.txt is made without it.

environment (now):
  WEB_MB=$WEB_MB, WEB_SCORE=$WEB_SCORE, WEB_LANGUAGE_SCORE=$WEB_LANGUAGE_SCORE
      at least so much web text, in files of about 80 MB (a larger WEB_MB later adds files); only pages with
      these scores, which stay the same for all files: delete data/web_*.txt to change them
  BOOK_IDS="1342 2701"
      these books instead of the list; each one is kept in data/books/
  FETCH_TIMEOUT=$FETCH_TIMEOUT, FETCH_PAUSE=$FETCH_PAUSE
      seconds that a file may take, and seconds between two books
  TINY_URL, GUTENBERG_URL, FINEWEB_URL, ALPACA_URL, SMOLLM2_URL
      where things come from: a mirror, or for FINEWEB_URL also a folder that has the Parquet files
EOT
}

fail() {
    echo "error: $*" >&2
    exit 2
}

# check NAME VALUE PATTERN MEANING: the whole of VALUE must match the regular expression PATTERN.
check() {
    [[ $2 =~ ^$3$ ]] || fail "$1 must be $4, not '$2'."
}

size() {
    echo $(($(wc -c <"$1")))            # the arithmetic drops the blanks that macOS puts before the number
}

# take_lock: one run at a time, or two would write to one .part.  To make a folder either succeeds or fails,
# for one run only, so a folder is the lock.  What a killed run has left is no lock: the process that it names
# is gone.
lock=data/fetch.lock
take_lock() {
    local owner
    mkdir -p data 2>/dev/null || fail "data/ cannot be written to."
    if ! mkdir $lock 2>/dev/null; then
        [ -d $lock ] || fail "data/ cannot be written to."
        owner=$(cat $lock/owner 2>/dev/null || true)    # empty: that run has started this very moment
        if [ -z "$owner" ] || kill -0 "$owner" 2>/dev/null; then
            fail "another run (process ${owner:-unknown}) is at work; wait for its end, or delete $lock."
        fi
    fi
    trap 'rm -rf $lock' EXIT
    rm -f $lock/*                       # whoever the killed run has left at work may still be writing there
    { echo $$ >$lock/owner; } 2>/dev/null || fail "data/ cannot be written to."
}

# quietly COMMAND...: the first line that COMMAND says goes into $message.  It runs in the background, because
# bash acts on a signal at once only while it waits for such a job.
message='' job=''
quietly() {
    local code=0
    "$@" >$lock/said 2>&1 &
    job=$!
    wait "$job" 2>/dev/null || code=$?
    job=''
    message=$(head -n 1 $lock/said)
    [ $code = 0 ] || message=${message:-no word why, exit code $code}
    return $code
}

# Ctrl-C: the .part files stay, for the next run to go on with.
interrupted() {
    [ -z "$job" ] || kill "$job" 2>/dev/null || true
    echo "Interrupted; run this again to go on." >&2
    exit 130
}
trap interrupted HUP INT TERM
trap '' XFSZ                            # a limit on the size of files is then an error, like a full disk

# ------------------------------------------------------------------------------------------------------------
# 2. Fetching one file
# ------------------------------------------------------------------------------------------------------------
# Two kinds of trouble.  An answer that is not what was asked for concerns this one file: the function returns
# 1, with a sentence in $problem.  A network that is gone, a full disk, or a server that refuses concerns all
# files: the run ends.
problem=''

# curl_below MOST WORD...: curl, for a file of MOST bytes.  Before version 8.4 curl sees to that only where
# the server announces a length, so the system stops it a megabyte later.
curl_below() {
    ulimit -Sf $(($1 / 1024 + 1024)) 2>/dev/null || true        # or at a lower limit that there is already
    exec curl --max-filesize "$@"
}

# download URL PART MOST: the whole of URL into PART, going on where an earlier try ended; no more than MOST
# bytes.  Returns 4 where the server says that there is no such file.
download() {
    local url=$1 part=$2 most=$3 code=0
    quietly curl_below "$most" --silent --show-error --fail --location --globoff --user-agent "$AGENT" \
        --connect-timeout 20 --speed-limit 100 --speed-time 60 --max-time "$FETCH_TIMEOUT" \
        --continue-at - --write-out '%{http_code}' --output "$part" "$url" || code=$?
    message=${message#*curl: (*) }      # of "curl: (6) No such host" the end; else the answer's code, 200
    [ ! -f "$part" ] || [ "$(size "$part")" -le "$most" ] || code=63
    case "$code:$message" in
        0:200 | 0:206 | 0:000 | 0:226)  # the last two: file:// and ftp://
            return 0 ;;
        33:* | 0:416 | 22:*416*)
            # The server cannot resume, or has nothing after what we have: start anew.  (Without a PART it is
            # neither.)
            [ -s "$part" ] || fail "$url cannot be fetched ($message)."
            rm -f "$part"
            download "$@"
            return ;;
        0:*)                            # a redirect to nowhere, say
            problem="$url answered $message instead of 200; nothing was kept." ;;
        63:*)
            problem="$url has more than the $most bytes that ${part%.part} may have; nothing was kept." ;;
        22:*404* | 22:*410*)
            problem="$url cannot be fetched ($message); see whether that address is still right."
            rm -f "$part"
            return 4 ;;
        22:*)
            fail "$url cannot be fetched ($message); the server refuses for now, so run this again later." ;;
        23:*)
            fail "$part cannot be written; is there room on the disk?" ;;
        *)
            fail "$url cannot be fetched ($message); run this again to go on when the network is back." ;;
    esac
    rm -f "$part"
    return 1
}

# get URL FILE LEAST MOST [IS_RIGHT]: make FILE from URL, unless it is there.  Refused are an answer below
# LEAST bytes or above MOST (a few times what is expected), a web page, and what the function IS_RIGHT does
# not accept.
get() {
    local url=$1 file=$2 least=$3 most=$4 is_right=${5:-true} part=$2.part
    [ ! -s "$file" ] || return 0
    mkdir -p "${file%/*}" 2>/dev/null || fail "${file%/*}/ cannot be written to."
    # What is there is gone on with in a copy: the curl of a killed run may still be writing to the file
    # itself.
    [ ! -f "$part" ] || { cp "$part" $lock/copy && mv $lock/copy "$part"; } 2>/dev/null ||
        fail "$part cannot be copied; is there room on the disk?"
    download "$url" "$part" "$most" || return
    if is_page "$part"; then
        problem="$url gave a web page (the login page of a network, perhaps); nothing was kept."
    elif [ "$(size "$part")" -lt "$least" ]; then
        problem="$url gave $(size "$part") bytes, but $file has at least $least; nothing was kept."
    elif ! $is_right "$part"; then
        problem="$url gave $(size "$part") bytes that are not what $file must be; nothing was kept."
    else
        mv "$part" "$file" || fail "$file cannot be written."
        return 0
    fi
    rm -f "$part"
    return 1
}

# fetch URL FILE LEAST MOST [IS_RIGHT]: the same, for a file without which the run makes no sense; says what
# it does.
fetch() {
    if [ -s "$2" ]; then
        echo "$2 is there ($(size "$2") bytes); nothing to fetch."
        return
    fi
    echo "Fetching $2 ..."
    get "$@" || fail "$problem"
    echo "$2: $(size "$2") bytes."
}

# One of the first words starts a web page, however many blanks and byte order marks (three bytes) stand
# before it.
is_page() {
    grep -aqiE '^<(!doctype|!--|html|head|body|[?]xml)' \
        <({ tr -d '\357\273\277' <"$1" | tr -s ' \t\r\v\f' '\n' | head -c 512; } 2>/dev/null)
}

# UTF-8 without NUL bytes: neither packed nor a picture.
is_text() {
    iconv -f UTF-8 -t UTF-8 "$1" 2>/dev/null | tr -d '\0' | cmp -s - "$1"
}

# Alpaca's form: a list of records, each with an instruction and an output, so that these keys put two on a
# line give the same line again and again.  A quote within a text is written \", so the pattern matches keys
# alone.
is_instructions() {
    is_text "$1" &&
        [ "$(head -c 100 "$1" | tr -d '[:space:]' | head -c 2)" = '[{' ] &&
        [ "$(tail -c 100 "$1" | tr -d '[:space:]' | tail -c 2)" = '}]' ] &&
        [ "$(grep -aoE '"(instruction|output)"[[:space:]]*:' "$1" | tr -d ' \t:' | paste - - | sort -u)" = \
            $'"instruction"\t"output"' ]
}

# ------------------------------------------------------------------------------------------------------------
# 3. Books
# ------------------------------------------------------------------------------------------------------------
# Author: number title; number title; ...  All are in English, and out of copyright in the USA.
classics() {
    cat <<'EOT'
Jane Austen: 1342 Pride and Prejudice; 158 Emma; 161 Sense and Sensibility; 141 Mansfield Park;
    105 Persuasion; 121 Northanger Abbey
Charles Dickens: 98 A Tale of Two Cities; 1400 Great Expectations; 766 David Copperfield; 730 Oliver Twist;
    1023 Bleak House; 786 Hard Times; 580 The Pickwick Papers; 46 A Christmas Carol
George Eliot: 145 Middlemarch; 507 Adam Bede; 550 Silas Marner; 6688 The Mill on the Floss
The Brontes: 1260 Jane Eyre; 9182 Villette; 768 Wuthering Heights; 969 The Tenant of Wildfell Hall
Thomas Hardy: 110 Tess of the d'Urbervilles; 153 Jude the Obscure; 107 Far from the Madding Crowd;
    143 The Mayor of Casterbridge; 122 The Return of the Native
Wilkie Collins: 155 The Moonstone; 583 The Woman in White
Anthony Trollope: 619 The Warden; 3409 Barchester Towers
Elizabeth Gaskell: 394 Cranford; 4276 North and South
William Thackeray: 599 Vanity Fair
Daniel Defoe: 521 Robinson Crusoe
Jonathan Swift: 829 Gulliver's Travels
Henry Fielding: 6593 Tom Jones
Oliver Goldsmith: 2667 The Vicar of Wakefield
Walter Scott: 82 Ivanhoe
Mary Shelley: 84 Frankenstein
Bram Stoker: 345 Dracula
Oscar Wilde: 174 The Picture of Dorian Gray; 844 The Importance of Being Earnest
Robert Louis Stevenson: 120 Treasure Island; 421 Kidnapped; 43 Dr Jekyll and Mr Hyde
Arthur Conan Doyle: 1661 The Adventures of Sherlock Holmes; 834 The Memoirs of Sherlock Holmes;
    108 The Return of Sherlock Holmes; 2852 The Hound of the Baskervilles; 244 A Study in Scarlet;
    139 The Lost World
H. G. Wells: 35 The Time Machine; 36 The War of the Worlds; 5230 The Invisible Man;
    159 The Island of Doctor Moreau
Joseph Conrad: 219 Heart of Darkness; 5658 Lord Jim; 2021 Nostromo; 974 The Secret Agent
Rudyard Kipling: 236 The Jungle Book; 2226 Kim
G. K. Chesterton: 1695 The Man Who Was Thursday; 204 The Innocence of Father Brown; 130 Orthodoxy
E. M. Forster: 2641 A Room with a View; 2891 Howards End
D. H. Lawrence: 217 Sons and Lovers
Ford Madox Ford: 2775 The Good Soldier
James Joyce: 2814 Dubliners; 4217 A Portrait of the Artist as a Young Man; 4300 Ulysses
Lewis Carroll: 11 Alice's Adventures in Wonderland; 12 Through the Looking-Glass
J. M. Barrie: 16 Peter Pan
Kenneth Grahame: 289 The Wind in the Willows
Frances Hodgson Burnett: 113 The Secret Garden; 146 A Little Princess
Jerome K. Jerome: 308 Three Men in a Boat
P. G. Wodehouse: 8164 My Man Jeeves
Agatha Christie: 863 The Mysterious Affair at Styles; 1155 The Secret Adversary
John Buchan: 558 The Thirty-Nine Steps
H. Rider Haggard: 2166 King Solomon's Mines
John Bunyan: 131 The Pilgrim's Progress
Herman Melville: 2701 Moby Dick
Mark Twain: 76 Huckleberry Finn; 74 Tom Sawyer; 86 A Connecticut Yankee in King Arthur's Court;
    3176 The Innocents Abroad; 245 Life on the Mississippi; 1837 The Prince and the Pauper
Nathaniel Hawthorne: 25344 The Scarlet Letter; 77 The House of the Seven Gables
Edgar Allan Poe: 2147 Works 1; 2148 Works 2
Washington Irving: 2048 The Sketch-Book
James Fenimore Cooper: 940 The Last of the Mohicans
Louisa May Alcott: 514 Little Women; 2788 Little Men
Harriet Beecher Stowe: 203 Uncle Tom's Cabin
Henry James: 2833 The Portrait of a Lady 1; 2834 The Portrait of a Lady 2; 209 The Turn of the Screw
Edith Wharton: 541 The Age of Innocence; 284 The House of Mirth; 4517 Ethan Frome
Jack London: 215 The Call of the Wild; 910 White Fang; 1056 Martin Eden
Willa Cather: 24 O Pioneers!; 242 My Antonia
Theodore Dreiser: 233 Sister Carrie
Upton Sinclair: 140 The Jungle
Sinclair Lewis: 1156 Babbitt
Sherwood Anderson: 416 Winesburg, Ohio
F. Scott Fitzgerald: 64317 The Great Gatsby
Stephen Crane: 73 The Red Badge of Courage
Kate Chopin: 160 The Awakening
L. M. Montgomery: 45 Anne of Green Gables
L. Frank Baum: 55 The Wonderful Wizard of Oz
Edward Bellamy: 624 Looking Backward
Edgar Rice Burroughs: 62 A Princess of Mars; 78 Tarzan of the Apes
Leo Tolstoy: 2600 War and Peace; 1399 Anna Karenina
Fyodor Dostoyevsky: 2554 Crime and Punishment; 28054 The Brothers Karamazov; 2638 The Idiot;
    600 Notes from Underground
Nikolai Gogol: 1081 Dead Souls
Victor Hugo: 135 Les Miserables; 2610 Notre-Dame de Paris
Alexandre Dumas: 1184 The Count of Monte Cristo; 1257 The Three Musketeers
Jules Verne: 164 Twenty Thousand Leagues under the Sea; 103 Around the World in Eighty Days;
    1268 The Mysterious Island
Gustave Flaubert: 2413 Madame Bovary
Honore de Balzac: 1237 Father Goriot
Voltaire: 19942 Candide
Miguel de Cervantes: 996 Don Quixote
Homer: 1727 The Odyssey, in prose; 2199 The Iliad, in prose
Tales: 2591 Grimms' Fairy Tales; 128 The Arabian Nights; 503 The Blue Fairy Book; 21 Aesop's Fables
Essays: 205 Thoreau, Walden; 2944 Emerson, Essays; 575 Bacon, Essays
Lives: 23 Douglass, Narrative of the Life; 148 Franklin, Autobiography; 2376 Washington, Up from Slavery;
    408 Du Bois, The Souls of Black Folk; 3296 Augustine, Confessions
History: 2707 Herodotus 1; 132 Sun Tzu, The Art of War
Philosophy: 1497 Plato, The Republic; 2680 Aurelius, Meditations; 1232 Machiavelli, The Prince;
    2130 More, Utopia; 34901 Mill, On Liberty; 4363 Nietzsche, Beyond Good and Evil;
    5827 Russell, The Problems of Philosophy
Politics and economy: 3420 Wollstonecraft, A Vindication of the Rights of Woman
Science: 1228 Darwin, On the Origin of Species; 944 Darwin, The Voyage of the Beagle;
    14474 Faraday, The Chemical History of a Candle
EOT
}

# list_books: the numbers, each once, one to a line.
list_books() {
    if [ -n "$BOOK_IDS" ]; then
        echo "$BOOK_IDS" | tr -sc '0-9' '\n'
    else
        classics | sed 's/^[^:]*: //' | tr ';' '\n' | sed 's/^ *//; s/ .*//'
    fi | awk '$0 != "" && !seen[$0]++'
}

# What Project Gutenberg wraps around a book, in thirty years of changing forms:
#
#     The Project Gutenberg EBook of ...             a few lines to hundreds
#     *** START OF THIS PROJECT GUTENBERG EBOOK THE LITTLE COLONEL'S HERO ***
#     Produced by ...                                credits: not the author's words either
#     (the book)
#     End of the Project Gutenberg EBook of ...      not always there
#     *** END OF THIS PROJECT GUTENBERG EBOOK THE LITTLE COLONEL'S HERO ***
#     (the licence, 350 lines)
#
# The marker may lack its stars or spaces, say THE or THIS, and run over some lines; old files have "*END*THE
# SMALL PRINT! ..." in its place, some of them after a START marker too.  Of what is left, a paragraph that
# names Project Gutenberg cannot be the author's, whose book is older: notes, further credits and licences go
# by that rule.
#
# The lines of a paragraph are joined, as the web text has them too: where a printed line ended tells a model
# nothing.  Verse must keep its lines.  A paragraph is prose when a new line began only where the next word
# would not have fitted; in verse, lists and headings a line ends early.  In doubt the lines stay.  Paragraphs
# are separated by one empty line.
STRIP='
    { sub(/[ \t]+$/, ""); line[NR] = $0 }

    # The last marker before the end, and the first end after a marker.
    function find_book(    i, j, here, both) {
        for (i = 1; i <= NR && !end; i++) {
            here = toupper(line[i])
            both = here " " toupper(line[i + 1])
            if (both ~ /^[^A-Z0-9]*START OF +(THE +|THIS +)?PROJECT +GUTENBERG/ ||
                here ~ /[*] *START OF +(THE +|THIS +)?PROJECT +GUTENBERG|[*]END[* ]*THE SMALL PRINT/) {
                start = i
                for (j = i; j <= i + 4 && line[j] != "" && line[j] !~ /[*]$/; j++) { }
                if (j <= i + 4 && line[j] != "") start = i = j        # the marker was closed on this line
            } else if (start && (both ~ /^[^A-Z0-9]*(THE +)?END OF +(THE +|THIS +)?PROJECT +GUTENBERG/ ||
                               here ~ /[*] *END OF +(THE +|THIS +)?PROJECT +GUTENBERG/ ||
                               here ~ /^[^A-Z0-9]*(START: FULL LICENSE|THE FULL PROJECT GUTENBERG)/ ||
                               here ~ /[*]START[* ]*THE SMALL PRINT/ && i > NR / 2))
                end = i
        }
        if (!end) end = NR + 1
    }

    # How wide the lines were set: 9 of 10 are not longer.  At least 66, or a book of verse would set its own
    # measure.
    function find_width(    i, lines, longer) {
        for (i = start + 1; i < end; i++) if (line[i] != "") { many[length(line[i])]++; lines++ }
        for (width = 200; width > 66 && longer + many[width] < lines / 10; width--) longer += many[width]
    }

    function is_prose(a, b,    i, word) {
        for (i = a; i < b; i++) {
            word = line[i + 1]
            sub(/ .*/, "", word)
            if (word == "") return 0            # that line is indented
            if (length(line[i]) + 1 + length(word) < 0.85 * width) return 0
        }
        return 1
    }

    # Lines a to b, between two empty lines.
    function paragraph(a, b,    i, text, upper) {
        for (i = a; i <= b; i++) text = text (i == a ? "" : line[i - 1] ~ /-$/ ? "" : " ") line[i]
        upper = toupper(text)
        if (upper ~ /PROJECT +GUTENBERG/) return
        if (++paragraphs <= 12) {                # credits stand at the front
            if (upper ~ /PROOFREAD|HTTPS?:\/\/|[A-Z]@[A-Z]/) return
            if (upper ~ /^ *(THIS )?(E-?(TEXT|BOOK) )?((WAS|IS) )?(PRODUCED|PREPARED|SCANNED|TRANSCRIBED) /)
                return
        }
        if (written++) print ""
        if (is_prose(a, b)) { sub(/^ +/, "", text); print text }
        else for (i = a; i <= b; i++) print line[i]
    }

    END {
        sub(/^\357\273\277/, "", line[1])       # the byte order mark
        find_book()
        if (!start) exit
        find_width()
        for (i = start + 1; i < end; i++) {
            if (line[i] == "") continue
            for (a = i; i + 1 < end && line[i + 1] != ""; i++) { }
            paragraph(a, i)
        }
    }'

# strip_book RAW FILE: the book in RAW, UTF-8 or else Western 8-bit text, without what surrounds it, into
# FILE.
strip_book() {
    local raw=$1 file=$2 encoding
    for encoding in UTF-8 CP1252 ISO-8859-1; do         # the last one takes any bytes
        if iconv -f $encoding -t UTF-8 "$raw" >/dev/null 2>&1; then break; fi
    done
    # Line ends: \r\n, also \r\r\n, and \r of old Macintoshes.  Lines that would pass for a separator are
    # dropped.
    {
        iconv -f $encoding -t UTF-8 "$raw" | tr -d '\0' | awk '{ sub(/\r+$/, ""); gsub(/\r/, "\n"); print }' |
            sed '/^[[:blank:]]*<|endoftext|>[[:blank:]]*$/d' | awk "$STRIP" >"$file.part"
    } 2>/dev/null || fail "$file.part cannot be written; is there room on the disk?"
    if [ "$(size "$file.part")" -ge 1000 ]; then
        mv "$file.part" "$file" || fail "$file cannot be written."
        return 0
    fi
    problem="no book is between the marks of Project Gutenberg, or there are no such marks; nothing was kept."
    rm -f "$file.part" "$raw"
    return 1
}

# join_books NUMBERS: those that are there, with the separator between them.
join_books() {
    local id separator=''
    for id in $1; do
        [ -s "data/books/$id.txt" ] || continue
        printf '%b' "$separator" || return 1
        cat "data/books/$id.txt" || return 1
        separator='\n<|endoftext|>\n\n'
    done
}

books() {
    local ids id file raw total number=0 missing='' misses=0 in_a_row=0
    ids=$(list_books)
    total=$(($(echo "$ids" | wc -l)))
    for id in $ids; do
        number=$((number + 1))
        file=data/books/$id.txt
        raw=data/books/$id.raw
        [ ! -s "$file" ] || continue
        if get "$GUTENBERG_URL/$id/pg$id.txt" "$raw" 1000 20000000 && strip_book "$raw" "$file"; then
            rm -f "$raw"
            in_a_row=0
            echo "$file: $(size "$file") bytes (book $number of $total)."
        else
            missing="$missing $id"
            misses=$((misses + 1))
            in_a_row=$((in_a_row + 1))
            echo "warning: book $id is left out: $problem" >&2
            [ $in_a_row -lt 5 ] || fail "five books in a row could not be had; see the warnings above."
        fi
        sleep "$FETCH_PAUSE"
    done
    missing="$misses of $total books are missing (${missing# })"
    [ $((misses * 10)) -le "$total" ] || fail "$missing, too many; run this again to try them once more."
    join_books "$ids" >data/books.txt.part 2>/dev/null ||
        fail "data/books.txt.part cannot be written; is there room on the disk?"
    mv data/books.txt.part data/books.txt || fail "data/books.txt cannot be written."
    echo "data/books.txt: $(size data/books.txt) bytes, $((total - misses)) books."
    [ $misses = 0 ] || echo "warning: $missing; run this again to try them once more." >&2
}

# ------------------------------------------------------------------------------------------------------------
# 4. Web
# ------------------------------------------------------------------------------------------------------------
# FineWeb-Edu's sample-10BT is 14 Parquet files of about 2.15 GB and 700,000 pages each.  Parquet keeps rows
# in groups (here of 1,000), each column of a group on its own, and at the end of the file a table of what is
# where.  DuckDB therefore reads a range of rows, and of these the columns that a query names, without the
# rest of the file.
#
# A slice is a twentieth of a Parquet file's rows, and slice n becomes data/web_n.txt: what a file holds
# depends on nothing but its number and the scores, however often the run was interrupted and whatever WEB_MB
# was.  (A WEB_MB for which the 14 do not suffice ends with an error that names the fifteenth.)
SLICES=20

# find_duckdb: make $duckdb its command line, the project's environment's or the system's, else install the
# former.
duckdb=''
find_duckdb() {
    for duckdb in .venv/bin/duckdb duckdb; do
        if "$duckdb" --version >/dev/null 2>&1; then return 0; fi
    done
    [ -x .venv/bin/python ] ||
        fail "DuckDB's command line is missing, and there is no .venv to install it into; run make first."
    echo "Installing DuckDB's command line into .venv (the package duckdb-cli, about 20 MB) ..."
    duckdb=.venv/bin/duckdb
    .venv/bin/python -m pip install --quiet --disable-pip-version-check duckdb-cli >/dev/null 2>&1 ||
        fail "pip cannot install duckdb-cli; see why with .venv/bin/python -m pip install duckdb-cli."
}

# write_slice NUMBER SHARD: the rows of one slice that pass, as documents with their separator between them.
# Dropped are NUL characters and lines that would pass for a separator.
write_slice() {
    local slice=$(($1 % SLICES)) shard=$2 parquet quote="'" remote=''
    parquet=$FINEWEB_URL/$(printf '%03d_00000.parquet' $(($1 / SLICES)))
    # To read over the network takes DuckDB's extension httpfs, which is installed once, from DuckDB's own
    # server.
    case "$parquet" in http://* | https://*)
        remote="INSTALL httpfs; LOAD httpfs;
                CREATE SECRET (TYPE http, EXTRA_HTTP_HEADERS MAP {'User-Agent': '$AGENT'});" ;;
    esac
    parquet=${parquet//$quote/$quote$quote}     # it goes between quotes
    rm -f "$shard.part"                         # DuckDB of a killed run may still be writing to it
    # One thread, so that there is one connection, and rows in the file's order.  COPY writes each row as it
    # is, and a newline after it.  The settings that a user may have in ~/.duckdbrc are not read.
    quietly "$duckdb" -init /dev/null -bail -c '.output /dev/null' -c "
        SET enable_progress_bar = false;
        SET threads = 1;
        $remote
        SET VARIABLE pages = (SELECT num_rows FROM parquet_file_metadata('$parquet'));
        COPY (
            SELECT CASE WHEN row_number() OVER () = 1 THEN '' ELSE E'\n<|endoftext|>\n\n' END || text FROM (
                SELECT trim(regexp_replace(regexp_replace(replace(text, chr(0), ''), '\r\n?', E'\n', 'g'),
                    '(?m)^[ \t]*<\|endoftext\|>[ \t]*\$\n?', '', 'g'), E' \t\n') AS text
                FROM read_parquet('$parquet', file_row_number = true)
                WHERE file_row_number >= getvariable('pages') * $slice // $SLICES
                  AND file_row_number < getvariable('pages') * ($slice + 1) // $SLICES
                  AND language = 'en' AND language_score >= $WEB_LANGUAGE_SCORE AND score >= $WEB_SCORE)
            WHERE text <> '')
        TO '$shard.part' (FORMAT csv, HEADER false, QUOTE '', ESCAPE '', DELIMITER E'\x01',
                          USE_TMP_FILE false)" || {
        rm -f "$shard.part"
        fail "$shard cannot be made from $parquet ($message); run this again to go on."
    }
    if [ ! -s "$shard.part" ]; then
        rm -f "$shard.part"
        fail "no page of $shard has WEB_SCORE=$WEB_SCORE, WEB_LANGUAGE_SCORE=$WEB_LANGUAGE_SCORE; lower them."
    fi
    mv "$shard.part" "$shard" || fail "$shard cannot be written."
    echo "$shard: $(size "$shard") bytes, part $((slice + 1)) of $SLICES of ${parquet##*/}."
}

web() {
    local settings made_with shard bytes=0 number=0 made=0
    settings="score >= $WEB_SCORE, language_score >= $WEB_LANGUAGE_SCORE"
    made_with=$(cat data/web.settings 2>/dev/null || echo "others")
    for shard in data/web_[0-9]*.txt; do
        [ ! -s "$shard" ] || [ "$settings" = "$made_with" ] ||
            fail "data/web_*.txt were not made with $settings but with $made_with; delete them, or set" \
                "WEB_SCORE and WEB_LANGUAGE_SCORE as they were."
    done
    while [ $bytes -lt $((WEB_MB * 1000000)) ]; do
        shard=$(printf 'data/web_%03d.txt' $number)
        if [ ! -s "$shard" ]; then
            [ $made -gt 0 ] || find_duckdb
            { echo "$settings" >data/web.settings; } 2>/dev/null || fail "data/ cannot be written to."
            write_slice $number "$shard"
            made=$((made + 1))
        fi
        bytes=$((bytes + $(size "$shard")))
        number=$((number + 1))
    done
    echo "data/web_*.txt: $bytes bytes in $number files$([ $made -gt 0 ] || echo "; nothing to fetch")."
}

# ------------------------------------------------------------------------------------------------------------
# 5. A model
# ------------------------------------------------------------------------------------------------------------
# Within its braces, the text of a JSON object shrinks to one member, m, from the inside out.  Strings,
# numbers and words are values, v; v:v is a member; a row of members is one, and so is a row of values; an
# object or a list, of one or empty, is a value again.  What is no JSON, or cut, gets stuck on the way:
# {"a": 1 "b": 2} at mm, {"a": [{}, [1]} at v:[v.
is_object_text() {
    [ "$(tr -d ' \t\r\n' | sed -E -e '/^\{.*\}$/!d' -e 's/^.//' -e 's/.$//' -e 's/\\.//g' \
        -e 's/"[^"]*"|-?[0-9][0-9.eE+-]*|true|false|null/v/g' \
        -e ':again' -e 's/v:v/m/g' -e 's/m,m/m/g' -e 's/v,v/v/g' -e 's/\{m?\}|\[v?\]/v/g' -e 't again')" = m ]
}

is_object() {
    is_text "$1" && is_object_text <"$1"
}

# A .safetensors file is 8 bytes (the header's length, the lowest byte first), the header {name: {dtype,
# shape, data_offsets: [begin, end]}} and the tensors' bytes, from which the offsets count: where the last one
# ends the file ends.
is_safetensors() {
    local length header end
    length=$(od -An -tu1 -N8 "$1" |
        awk 'NF == 8 { for (i = 8; i >= 1; i--) n = 256 * n + $i; if (n < 10000000) print n }')
    header=$(head -c "$((8 + ${length:-0}))" "$1" | tail -c +9 | tr -d '\0')
    echo "$header" | is_object_text || return 1
    end=$(echo "$header" | tr -d ' \t\r\n' | grep -aoE '"data_offsets":\[[0-9]+,[0-9]{1,15}\]' |
        sed 's/.*,//; s/]//' | sort -n | tail -n 1)
    [ "$(size "$1")" = $((8 + length + 10#${end:-0})) ]
}

# The tensors come last, so a folder that has them is complete, and whether there is a template is not asked
# again: a model has it either in this file or, as the older form was, in tokenizer_config.json.
#
# Tried with a server on the same machine that holds small files of these forms, and that redirects, cuts,
# stalls and gives wrong answers (tests/test_fetch.py); not with huggingface.co, nor with the real 270 MB.
smollm2() {
    local folder=out/smollm2 name
    for name in config.json tokenizer.json tokenizer_config.json; do
        fetch "$SMOLLM2_URL/$name" $folder/$name 2 20000000 is_object
    done
    if [ ! -s $folder/model.safetensors ]; then
        name=chat_template.jinja
        get "$SMOLLM2_URL/$name" $folder/$name 1 20000000 is_text || [ $? = 4 ] || fail "$problem"
    fi
    fetch "$SMOLLM2_URL/model.safetensors" $folder/model.safetensors 1000000 1000000000 is_safetensors
    echo "Talk to it: python chat.py --model $folder"
}

# ------------------------------------------------------------------------------------------------------------
# 6. The command line
# ------------------------------------------------------------------------------------------------------------
case "${1:-}" in
    "") usage >&2; exit 2 ;;
    -h | --help) usage; exit 0 ;;
esac
command -v curl >/dev/null || fail "curl is missing; install it (Debian, Ubuntu: apt install curl)."
command -v iconv >/dev/null || fail "iconv is missing; install it (Debian, Ubuntu: apt install libc-bin)."
check FETCH_TIMEOUT "$FETCH_TIMEOUT" '[1-9][0-9]*' "a whole number of seconds, at least 1"
check FETCH_PAUSE "$FETCH_PAUSE" '[0-9]+' "a whole number of seconds"
check WEB_MB "$WEB_MB" '[1-9][0-9]{0,5}' "a whole number of megabytes, at least 1"
check WEB_SCORE "$WEB_SCORE" '[0-9]+([.][0-9]+)?' "a number, such as 3 or 3.5"
check WEB_LANGUAGE_SCORE "$WEB_LANGUAGE_SCORE" '[0-9]+([.][0-9]+)?' "a number from 0 to 1, such as 0.8"
check BOOK_IDS "$BOOK_IDS" '([[:space:],]*[0-9][0-9[:space:],]*)?' "Project Gutenberg's numbers"
for word in "$@"; do                    # nothing is fetched if one word is wrong
    check WORD "$word" '(tiny|books|web|instructions|smollm2|all)' \
        "tiny, books, web, instructions, smollm2 or all"
done
take_lock
for word in "$@"; do
    case "$word" in tiny) fetch "$TINY_URL" data/tiny.txt 500000 20000000 is_text ;; esac
    case "$word" in books | all) books ;; esac
    case "$word" in web | all) web ;; esac
    case "$word" in instructions | all)
        fetch "$ALPACA_URL" data/instructions.json 1000 200000000 is_instructions ;; esac
    case "$word" in smollm2) smollm2 ;; esac
done
