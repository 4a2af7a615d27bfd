#!/usr/bin/env bash
# fetch_data.sh: bring text to train on into data/, and a model to talk to into out/, of the current folder, where
# train.py and chat.py look for them.  Git ignores both.  `./fetch_data.sh --help` says what there is.
#
# A file is fetched as NAME.part.  It gets its own name once it is whole and looks like what was asked for, so
# a file is never half a file.  A second run goes on where the first one was interrupted, and fetches nothing
# that is there.  The script fetches one thing at a time, pauses between books, and stops at the first sign
# that the network is gone or that a server wants to be left alone.
#
# One word, english, needs no network: it makes a text from the documentation that every Python brings.
#
# Read before it: nothing.  What it does not do: it does not judge what a text says, and it removes no
# duplicates.  It needs bash (3.2, as macOS has it, is enough), curl and Python; web, blimp and preferences also
# need DuckDB's command line.
#
#   1. settings        what the environment can change, and the usage
#   2. fetching        one file from one address: resumed, checked, renamed
#   3. checking        in Python: is it what was asked for?  It also takes a book out of its wrapping
#   4. books           Project Gutenberg: the list, and one file of all
#   5. web             FineWeb-Edu: rows of Parquet files, which DuckDB filters into text
#   6. words           one function for each word of the command line; one run at a time
set -euo pipefail
venv=$(dirname -- "$0")/.venv           # what `make` has made beside this script
export LC_ALL=C                         # bytes, whatever the user's language: everybody gets the same file

# ------------------------------------------------------------------------------------------------------------
# 1. Settings
# ------------------------------------------------------------------------------------------------------------
# Where things come from.  Another address can stand in, such as a mirror.
TINY_URL=${TINY_URL:-https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt}
ALPACA_URL=${ALPACA_URL:-https://raw.githubusercontent.com/tatsu-lab/stanford_alpaca/main/alpaca_data.json}
GUTENBERG_URL=${GUTENBERG_URL:-https://www.gutenberg.org/cache/epub}
FINEWEB_URL=${FINEWEB_URL:-https://huggingface.co/datasets/HuggingFaceFW/fineweb-edu/resolve/main/sample/10BT}
DATASETS_URL=${DATASETS_URL:-hf://datasets}     # DuckDB's name for the data sets on huggingface.co
SMOLLM2_URL=${SMOLLM2_URL:-https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct/resolve/main}
AGENT="NanoEuler-fetch_data.sh/1.0 (a language model for teaching; fetches a few public text files)"

FETCH_TIMEOUT=${FETCH_TIMEOUT:-7200}    # for one file; a connection that stalls for a minute ends sooner
FETCH_PAUSE=${FETCH_PAUSE:-2}           # what Project Gutenberg asks of programs

# 2 GB of English is about 600 million tokens of a vocabulary of 4,096 (3.4 bytes each).  Four epochs of them,
# which are about as good as new text (Muennighoff et al., 2023), are 20 tokens for each parameter of the big
# model (Hoffmann et al., 2022).
WEB_MB=${WEB_MB:-2000}
# FineWeb-Edu rates from 0 to 5 how much a page teaches, and keeps what rounds to 3 or more.  The pages with 3.0 or
# more are about the better half of those.
WEB_SCORE=${WEB_SCORE:-3}
# How sure a classifier is that a page is English.  FineWeb keeps 0.65 and above.  Below 0.8 a page may be
# half another language, or lists and tables.
WEB_LANGUAGE_SCORE=${WEB_LANGUAGE_SCORE:-0.8}

usage="usage: ./fetch_data.sh WORD...
  tiny          Tiny Shakespeare: scenes from the plays, 1.1 MB -> data/tiny.txt (public domain)
  english       without a network: the English of Python's documentation -> data/english.txt, and with it
                what sft.py and rl.py learn from (Python's licence)
  books         169 classics, 110 MB in 10 minutes -> data/books.txt
                (Project Gutenberg; public domain in the USA, elsewhere see the law of your country)
  web           FineWeb-Edu's sample-10BT, WEB_MB MB or a little more -> data/web_000.txt, ... (ODC-By 1.0, and Common Crawl's terms of use)
  instructions  Alpaca's 52,002 instructions, 23 MB -> data/instructions.json (CC BY-NC 4.0: not commercial)
  preferences   UltraFeedback: 61,000 prompts, a better and a worse answer -> data/preferences.jsonl (MIT)
  blimp         BLiMP: 67,000 pairs of a good and a bad sentence, 10 MB -> data/blimp.jsonl (CC BY 4.0)
  smollm2       SmolLM2-135M-Instruct, a model to talk to, 270 MB -> out/smollm2/ (Apache 2.0)
  all           books, web and instructions
Into data/ and out/ of the current folder.  Run again, it goes on, and fetches only what is missing.
web, blimp and preferences read with DuckDB's command line, which they install if make was run.
Environment, with its values now (but BOOK_IDS is an example):
  WEB_MB=$WEB_MB: MB of web text
  WEB_SCORE=$WEB_SCORE WEB_LANGUAGE_SCORE=$WEB_LANGUAGE_SCORE: the lowest scores of a page that is taken
  BOOK_IDS='1342 2701': these books instead of the list
  FETCH_TIMEOUT=$FETCH_TIMEOUT FETCH_PAUSE=$FETCH_PAUSE: seconds that curl may take for a file, and between two books
  TINY_URL GUTENBERG_URL FINEWEB_URL ALPACA_URL DATASETS_URL SMOLLM2_URL: other addresses, such as mirrors;
  FINEWEB_URL and DATASETS_URL may also name a folder"

fail() { echo "error: $*" >&2; exit 2; }

# check NAME VALUE PATTERN MEANING: the whole of VALUE must match the regular expression PATTERN.
check() { [[ $2 =~ ^($3)$ ]] || fail "$1 must be $4, not '$2'."; }

size() { echo $(($(wc -c <"$1"))); }    # the arithmetic drops the blanks that macOS puts before the number

# ------------------------------------------------------------------------------------------------------------
# 2. Fetching
# ------------------------------------------------------------------------------------------------------------
lock=data/fetch.lock                    # a folder, see the end of section 6; it also holds what commands say

# Ctrl-C: the .part files stay, for the next run to go on with.
trap 'kill $(jobs -p) 2>/dev/null || true; echo "Interrupted; run this again to go on." >&2; exit 130' HUP INT TERM
trap '' XFSZ                            # a limit on the size of files is then an error, like a full disk

# quietly COMMAND...: the first line that COMMAND prints goes into $message.  COMMAND runs in the background,
# because bash acts on a signal at once only while it waits for such a job.
quietly() {
    local code=0
    "$@" >$lock/said 2>&1 &
    wait $! 2>/dev/null || code=$?
    message=$(head -n 1 $lock/said)
    return $code
}

# curl_below MOST WORD...: curl, for a file of at most MOST bytes.  Before version 8.4 curl stops at MOST only if the
# server announces a length.  So ulimit lets the system stop it, a megabyte later.  -q must come first: then curl does
# not read the user's ~/.curlrc, whose options may change what is written into a file.
curl_below() {
    ulimit -Sf $(($1 / 1024 + 1024)) 2>/dev/null || true        # or at a lower limit that there is already
    exec curl -q --max-filesize "$@"
}

# get URL FILE LEAST MOST KIND: make FILE from URL, unless it is there.  It has LEAST to MOST bytes, where
# MOST is far above what is expected, and is of one of section 3's kinds.
#
# There are two sorts of trouble.  An answer that is not what was asked for concerns this one file: the
# function returns 1, with a sentence in $problem.  A network that is gone, a full disk, or a server that
# refuses concerns all files: the run ends.
get() {
    local url=$1 file=$2 least=$3 most=$4 kind=$5 part=$2.part code=0
    [ ! -s "$file" ] || { echo "$file is there ($(size "$file") bytes); nothing to fetch."; return; }
    echo "Fetching $file ..."
    mkdir -p "${file%/*}" 2>/dev/null || fail "${file%/*}/ cannot be written to."
    # curl goes on with a copy, because the curl of a killed run may still be writing to the file itself.
    [ ! -f "$part" ] || { cp "$part" $lock/copy && mv $lock/copy "$part"; } 2>/dev/null ||
        fail "$part cannot be copied; is there room on the disk?"
    quietly curl_below "$most" --silent --show-error --fail --location --globoff --user-agent "$AGENT" \
        --connect-timeout 20 --speed-limit 100 --speed-time 60 --max-time "$FETCH_TIMEOUT" \
        --continue-at - --write-out '%{http_code}' --output "$part" "$url" || code=$?
    message=${message#*curl: (*) }      # of "curl: (6) No such host" the end; else the answer's code, 200
    [ ! -f "$part" ] || [ "$(size "$part")" -le "$most" ] || code=63
    # The server cannot resume (curl's error 33), or has nothing more to send (HTTP's 416): start again from the first
    # byte.
    if [[ $code:$message =~ ^(33:|0:416|22:.*416) && -s $part ]]; then rm -f "$part"; get "$@"; return; fi
    case "$code:$message" in
        0:200 | 0:206 | 0:000)          # 000: it came from file://
            quietly accept "$kind" "$part" "$file" "$least" ||
                fail "$file cannot be written ($(tail -n 1 $lock/trouble)); is there room on the disk?"
            problem=${message:+"$url gave $message; nothing was kept."} ;;
        0:*) problem="$url answered $message instead of 200; nothing was kept." ;;      # such as a redirect
        63:*) problem="$url has more than the $most bytes that $file may have; nothing was kept." ;;
        22:*404* | 22:*410*) problem="$url cannot be fetched ($message); is that address still right?" ;;
        22:*) fail "$url cannot be fetched ($message); the server refuses for now; run this again later." ;;
        23:*) fail "$part cannot be written; is there room on the disk?" ;;
        *) fail "$url cannot be fetched ($message); run this again to go on when the network is back." ;;
    esac
    rm -f "$part"
    [ -z "$problem" ] || return 1
    echo "$file: $(size "$file") bytes."
}

# ------------------------------------------------------------------------------------------------------------
# 3. Checking
# ------------------------------------------------------------------------------------------------------------
# accept KIND PART FILE LEAST: rename PART to FILE, or say what is wrong with it.  Of a book FILE gets the
# author's words alone.  Project Gutenberg wraps them, in thirty years of changing forms:
#
#     The Project Gutenberg EBook of ...             a few lines to hundreds
#     *** START OF THIS PROJECT GUTENBERG EBOOK THE LITTLE COLONEL'S HERO ***
#     Produced by ...                                credits: not the author's words either
#     (the book)
#     End of the Project Gutenberg EBook of ...      not always there
#     *** END OF THIS PROJECT GUTENBERG EBOOK THE LITTLE COLONEL'S HERO ***
#     (the licence, 350 lines)
#
# A marker may lack its stars or spaces, say THE or THIS, and run over some lines.  Old files have "*END*THE
# SMALL PRINT! ..." in its place, some of them after a START marker too.  A paragraph that names Project
# Gutenberg is not the author's, because the book is older.  It is a note, a credit or a licence.
#
# The lines of a paragraph are joined, as the web text has them too: where a printed line ended tells a model
# nothing.  Verse must keep its lines.  A paragraph is prose when each new line began only where the next word
# would not have fitted.  In verse, lists and headings a line ends early.  In doubt the lines stay.
accept() {
    exec "$python" -I - "$@" 2>$lock/trouble <<'EOF'
import json, pathlib, re, sys

GUTENBERG = rb"\s+OF\s+(THE\s+|THIS\s+)?PROJECT\s+GUTENBERG"
# For example "*** START OF THE PROJECT GUTENBERG EBOOK EMMA ***".
BEFORE = rb"^(([^A-Z0-9\n]*\n)?[^A-Z0-9\n]*|.*\* *)"       # stars and the like; or anything, but then a star
CLOSED = rb"((.*\n(?!\n)){0,4}?.*\*|.*)$"                   # up to a star that ends a line, if one comes soon
START = BEFORE + rb"START" + GUTENBERG + CLOSED + rb"|^.*\*END[* ]*THE SMALL PRINT" + CLOSED
END = BEFORE + rb"((THE\s+)?END" + GUTENBERG + rb"|START: FULL LICENSE|THE FULL PROJECT GUTENBERG)"
MARKS = re.compile(rb"(?P<start>%b)|(?P<end>%b)|^.*\*START[* ]*THE SMALL PRINT" % (START, END), re.I | re.M)
CREDITS = re.compile(rb"PROOFREAD|HTTPS?://|[A-Z]@[A-Z]|^ *(THIS\s)?(E-?(TEXT|BOOK)\s)?((WAS|IS)\s)?"
                     rb"(PRODUCED|PREPARED|SCANNED|TRANSCRIBED)\s", re.I)
WEB_PAGE = re.compile(rb"<(!doctype|!--|\?xml|[a-z]+[1-6]?[\s/>])", re.I)


def join_prose(paragraph, width):
    lines = paragraph.split(b"\n")
    with_next_word = [len(line + b" " + after.split(b" ")[0]) for line, after in zip(lines, lines[1:])]
    if b"\n " in paragraph or min(with_next_word, default=width) < 0.85 * width:
        return paragraph
    return paragraph.replace(b"-\n", b"-").replace(b"\n", b" ").lstrip(b" ")


def strip_book(data):
    try:
        data = data.decode("utf-8-sig").encode()
    except UnicodeDecodeError:
        data = data.decode("cp1252", "replace").encode()    # Western 8-bit text
    # Lines end in \n, \r\n, \r\r\n, or \r as on old Macintoshes.  None may pass for a separator of documents.
    lines = data.replace(b"\0", b"").replace(b"\r\r\n", b"\n").splitlines()
    text = b"\n".join(line.rstrip(b" \t") for line in lines if line.strip(b" \t") != b"<|endoftext|>")
    # The book stands between the last start and the first end after a start.
    start = end = len(text)
    for mark in MARKS.finditer(text):
        if mark["start"]:
            start = mark.end()
        elif start < end and (mark["end"] or mark.start() > len(text) / 2):
            end = mark.start()
            break
    paragraphs = re.split(rb"\n\n+", text[start:end].strip(b"\n"))
    # How wide the lines were set: 9 of 10 are not longer.  At least 66, or verse would set its own measure.
    lengths = sorted(len(line) for paragraph in paragraphs for line in paragraph.split(b"\n"))
    width = min(max(66, lengths[len(lengths) * 9 // 10]), 200)
    paragraphs = [text for text in paragraphs if not re.search(rb"PROJECT\s+GUTENBERG", text, re.I)]
    paragraphs[:12] = [text for text in paragraphs[:12] if not CREDITS.search(text)]
    return b"\n\n".join(join_prose(text, width) for text in paragraphs) + b"\n"


# A .safetensors file: the header's length in 8 bytes, the header in JSON, the tensors, whose offsets count
# from there.  The file ends where the last tensor ends.
def is_whole_model(data):
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = json.loads(data[8:start])
    tensors.pop("__metadata__", None)
    return start + max(tensor["data_offsets"][1] for tensor in tensors.values()) == len(data)


# Whether these bytes are what a file of the kind must be.
KINDS = {
    "text": lambda data: "\0" not in data.decode(),
    "book": lambda data: True,
    "JSON": lambda data: isinstance(json.loads(data), dict),
    "instructions": lambda data: all(row.keys() >= {"instruction", "output"} for row in json.loads(data)),
    "model": is_whole_model}


def accept(kind, part, file, least):
    data = pathlib.Path(part).read_bytes()
    if WEB_PAGE.match(data.lstrip(b" \t\r\n\v\f\xef\xbb\xbf")):
        return "a web page (the login page of a network, perhaps)"
    kept = strip_book(data) if kind == "book" else data
    try:
        right = len(kept) >= int(least) and KINDS[kind](kept)
    except Exception:                                       # whatever it is, it cannot be read as this kind
        right = False
    if not right:
        return f"{len(data)} bytes that are not what {file} must be ({kind}, at least {least} bytes)"
    if kind == "book":
        part = f"{file}.new"
        pathlib.Path(part).write_bytes(kept)
    pathlib.Path(part).replace(file)


print(accept(*sys.argv[1:]) or "")
EOF
}

# ------------------------------------------------------------------------------------------------------------
# 4. Books
# ------------------------------------------------------------------------------------------------------------
# The numbers of Project Gutenberg, in the order of the titles above them.  All are in English, and out of
# copyright in the USA.
classics=(
    # Jane Austen: Pride and Prejudice, Emma, Sense and Sensibility, Mansfield Park, Persuasion, Northanger
    # Abbey; Charles Dickens: A Tale of Two Cities, Great Expectations, David Copperfield, Oliver Twist, Bleak
    # House, Hard Times, The Pickwick Papers, A Christmas Carol; George Eliot: Middlemarch, Adam Bede, Silas
    # Marner, The Mill on the Floss.
    1342 158 161 141 105 121  98 1400 766 730 1023 786 580 46  145 507 550 6688
    # The Brontes: Jane Eyre, Villette, Wuthering Heights, The Tenant of Wildfell Hall; Thomas Hardy: Tess of
    # the d'Urbervilles, Jude the Obscure, Far from the Madding Crowd, The Mayor of Casterbridge, The Return
    # of the Native; Wilkie Collins: The Moonstone, The Woman in White; Anthony Trollope: The Warden,
    # Barchester Towers; Elizabeth Gaskell: Cranford, North and South; William Thackeray: Vanity Fair; Daniel
    # Defoe: Robinson Crusoe; Jonathan Swift: Gulliver's Travels; Henry Fielding: Tom Jones.
    1260 9182 768 969  110 153 107 143 122  155 583  619 3409  394 4276  599  521  829  6593
    # Oliver Goldsmith: The Vicar of Wakefield; Walter Scott: Ivanhoe; Mary Shelley: Frankenstein; Bram
    # Stoker: Dracula; Oscar Wilde: The Picture of Dorian Gray, The Importance of Being Earnest; Robert Louis
    # Stevenson: Treasure Island, Kidnapped, Dr Jekyll and Mr Hyde; Arthur Conan Doyle: The Adventures of
    # Sherlock Holmes, The Memoirs of Sherlock Holmes, The Return of Sherlock Holmes, The Hound of the
    # Baskervilles, A Study in Scarlet, The Lost World; H. G. Wells: The Time Machine, The War of the Worlds,
    # The Invisible Man, The Island of Doctor Moreau.
    2667  82  84  345  174 844  120 421 43  1661 834 108 2852 244 139  35 36 5230 159
    # Joseph Conrad: Heart of Darkness, Lord Jim, Nostromo, The Secret Agent; Rudyard Kipling: The Jungle
    # Book, Kim; G. K. Chesterton: The Man Who Was Thursday, The Innocence of Father Brown, Orthodoxy; E. M.
    # Forster: A Room with a View, Howards End; D. H. Lawrence: Sons and Lovers; Ford Madox Ford: The Good
    # Soldier; James Joyce: Dubliners, A Portrait of the Artist as a Young Man, Ulysses; Lewis Carroll:
    # Alice's Adventures in Wonderland, Through the Looking-Glass.
    219 5658 2021 974  236 2226  1695 204 130  2641 2891  217  2775  2814 4217 4300  11 12
    # J. M. Barrie: Peter Pan; Kenneth Grahame: The Wind in the Willows; Frances Hodgson Burnett: The Secret
    # Garden, A Little Princess; Jerome K. Jerome: Three Men in a Boat; P. G. Wodehouse: My Man Jeeves; Agatha
    # Christie: The Mysterious Affair at Styles, The Secret Adversary; John Buchan: The Thirty-Nine Steps; H.
    # Rider Haggard: King Solomon's Mines; John Bunyan: The Pilgrim's Progress; Herman Melville: Moby Dick;
    # Mark Twain: Huckleberry Finn, Tom Sawyer, A Connecticut Yankee in King Arthur's Court, The Innocents
    # Abroad, Life on the Mississippi, The Prince and the Pauper.
    16  289  113 146  308  8164  863 1155  558  2166  131  2701  76 74 86 3176 245 1837
    # Nathaniel Hawthorne: The Scarlet Letter, The House of the Seven Gables; Edgar Allan Poe: Works 1, Works
    # 2; Washington Irving: The Sketch-Book; James Fenimore Cooper: The Last of the Mohicans; Louisa May
    # Alcott: Little Women, Little Men; Harriet Beecher Stowe: Uncle Tom's Cabin; Henry James: The Portrait of
    # a Lady 1, The Portrait of a Lady 2, The Turn of the Screw; Edith Wharton: The Age of Innocence, The
    # House of Mirth, Ethan Frome; Jack London: The Call of the Wild, White Fang, Martin Eden.
    25344 77  2147 2148  2048  940  514 2788  203  2833 2834 209  541 284 4517  215 910 1056
    # Willa Cather: O Pioneers!, My Antonia; Theodore Dreiser: Sister Carrie; Upton Sinclair: The Jungle;
    # Sinclair Lewis: Babbitt; Sherwood Anderson: Winesburg; F. Scott Fitzgerald: The Great Gatsby; Stephen
    # Crane: The Red Badge of Courage; Kate Chopin: The Awakening; L. M. Montgomery: Anne of Green Gables; L.
    # Frank Baum: The Wonderful Wizard of Oz; Edward Bellamy: Looking Backward; Edgar Rice Burroughs: A
    # Princess of Mars, Tarzan of the Apes; Leo Tolstoy: War and Peace, Anna Karenina.
    24 242  233  140  1156  416  64317  73  160  45  55  624  62 78  2600 1399
    # Fyodor Dostoyevsky: Crime and Punishment, The Brothers Karamazov, The Idiot, Notes from Underground;
    # Nikolai Gogol: Dead Souls; Victor Hugo: Les Miserables, Notre-Dame de Paris; Alexandre Dumas: The Count
    # of Monte Cristo, The Three Musketeers; Jules Verne: Twenty Thousand Leagues under the Sea, Around the
    # World in Eighty Days, The Mysterious Island; Gustave Flaubert: Madame Bovary; Honore de Balzac: Father
    # Goriot; Voltaire: Candide; Miguel de Cervantes: Don Quixote.
    2554 28054 2638 600  1081  135 2610  1184 1257  164 103 1268  2413  1237  19942  996
    # Homer (in prose): The Odyssey, The Iliad; tales: Grimms' Fairy Tales, The Arabian Nights, The Blue Fairy
    # Book, Aesop's Fables; essays: Thoreau's Walden, Emerson's, Bacon's; lives: Douglass's Narrative,
    # Franklin's Autobiography, Washington's Up from Slavery, Du Bois's The Souls of Black Folk, Augustine's
    # Confessions; history: Herodotus 1, Sun Tzu's The Art of War.
    1727 2199  2591 128 503 21  205 2944 575  23 148 2376 408 3296  2707 132
    # Philosophy: Plato's Republic, Aurelius's Meditations, Machiavelli's The Prince, More's Utopia, Mill's On
    # Liberty, Nietzsche's Beyond Good and Evil, Russell's The Problems of Philosophy; politics:
    # Wollstonecraft's A Vindication of the Rights of Woman; science: Darwin's On the Origin of Species, his
    # The Voyage of the Beagle, Faraday's The Chemical History of a Candle.
    1497 2680 1232 2130 34901 4363 5827  3420  1228 944 14474)

books() {
    local id ids file total number=0 misses=0 missing='' made=()
    ids=$(echo "${BOOK_IDS:-${classics[*]}}" | grep -oE '[0-9]+' | awk '!seen[$0]++')
    total=$(echo "$ids" | grep -c .)
    for id in $ids; do
        file=data/books/$id.txt
        number=$((number + 1))
        if [ ! -s "$file" ]; then
            echo "Book $number of $total:"
            misses=$((misses + 1))
            get "$GUTENBERG_URL/$id/pg$id.txt" "$file" 1000 20000000 book && misses=0
            [ $misses = 0 ] || echo "warning: book $id is left out: $problem" >&2
            [ $misses -lt 5 ] || fail "five books in a row could not be fetched; see the warnings above."
            sleep "$FETCH_PAUSE"
        fi
        if [ -s "$file" ]; then made+=("$file"); else missing="$missing $id"; fi
    done
    missing="$((total - ${#made[@]})) of $total books are missing (${missing# })"
    [ $((${#made[@]} * 10)) -ge $((total * 9)) ] || fail "$missing, too many; run this again to try them."
    awk 'FNR == 1 && NR > 1 { print "\n<|endoftext|>\n" } 1' "${made[@]}" >data/books.txt.part 2>/dev/null ||
        fail "data/books.txt.part cannot be written; is there room on the disk?"
    mv data/books.txt.part data/books.txt
    echo "data/books.txt: $(size data/books.txt) bytes, ${#made[@]} books."
    [ ${#made[@]} = "$total" ] || echo "warning: $missing; run this again to try them." >&2
}

# ------------------------------------------------------------------------------------------------------------
# 5. Web
# ------------------------------------------------------------------------------------------------------------
# FineWeb-Edu's sample-10BT is 14 Parquet files of up to 2.15 GB and 700,000 pages each.  Parquet keeps rows
# in groups (here of 1,000), each column of a group on its own, and at the end of the file a table of what is
# where.  So DuckDB reads a range of rows, and of these the columns that a query names, without the rest of
# the file.
#
# A slice is a twentieth of a Parquet file's rows, and slice n becomes data/web_n.txt.  What this file holds
# depends only on n and the scores.  Interruptions and WEB_MB make no difference.  (A WEB_MB that is more than
# the 14 files hold ends with an error that names the fifteenth.)
SLICES=20

# find_duckdb: set $duckdb to its command line, in $venv or on the system; where there is none, install it.
duckdb='' remote=''
find_duckdb() {
    for duckdb in "$venv/bin/duckdb" duckdb; do "$duckdb" --version >/dev/null 2>&1 && return; done
    echo "Installing DuckDB's command line into $venv (the package duckdb-cli, about 20 MB) ..."
    duckdb=$venv/bin/duckdb
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check duckdb-cli >/dev/null 2>&1 ||
        fail "DuckDB cannot be installed; run make first, or see why: $venv/bin/python -m pip install duckdb-cli."
}

# query PARQUET FILE SQL [FORMAT EMPTY]: make FILE of what SQL finds in PARQUET, getvariable('files') there.  SQL ends
# in a COPY (SELECT ...).  EMPTY is the error message if it finds nothing.
query() {
    [ ! -s "$2" ] || { echo "$2 is there ($(size "$2") bytes); nothing to fetch."; return; }
    [ -n "$duckdb" ] || find_duckdb
    # To read over the network takes DuckDB's extension httpfs, installed once from DuckDB's own server.
    [[ $1 != *://* ]] || remote="INSTALL httpfs; LOAD httpfs;
        CREATE SECRET (TYPE http, EXTRA_HTTP_HEADERS MAP {'User-Agent': '$AGENT'});"
    rm -f "$2.part"                             # the DuckDB of a killed run may still be writing to it
    # One thread, so that there is one connection, and rows in the file's order.  The settings that a user may have
    # in ~/.duckdbrc are not read.
    quietly "$duckdb" -init /dev/null -bail -c '.output /dev/null' -c "SET enable_progress_bar = false;
        SET threads = 1; SET VARIABLE files = \$\$$1\$\$; $remote $3 TO '$2.part' (${4:-FORMAT json}, USE_TMP_FILE false)" ||
        fail "$2 cannot be made from $1 (${message:-no word why}); run this again to go on."
    [ -s "$2.part" ] || fail "${5:-$1 holds no rows.}"
    mv "$2.part" "$2"
    echo "$2: $(size "$2") bytes from ${1##*/}."
}

# write_slice NUMBER SHARD: the rows of one slice that pass, as documents with their separator between them.
# NUL characters are dropped, and lines that would pass for a separator.  COPY writes each row as it is, and a
# newline after it.
write_slice() {
    query "$FINEWEB_URL/$(printf '%03d_00000.parquet' $(($1 / SLICES)))" "$2" "
        SET VARIABLE pages = (SELECT num_rows FROM parquet_file_metadata(getvariable('files')));
        COPY (SELECT CASE WHEN row_number() OVER () = 1 THEN '' ELSE E'\n<|endoftext|>\n\n' END || text FROM (
                SELECT trim(regexp_replace(regexp_replace(replace(text, chr(0), ''), '\r\n?', E'\n', 'g'),
                    '(?m)^[ \t]*<\|endoftext\|>[ \t]*\$\n?', '', 'g'), E' \t\n') AS text
                FROM read_parquet(getvariable('files'), file_row_number = true)
                WHERE file_row_number >= getvariable('pages') * ($1 % $SLICES) // $SLICES
                  AND file_row_number < getvariable('pages') * ($1 % $SLICES + 1) // $SLICES
                  AND language = 'en' AND language_score >= $WEB_LANGUAGE_SCORE AND score >= $WEB_SCORE)
            WHERE text <> '')" "FORMAT csv, HEADER false, QUOTE '', ESCAPE '', DELIMITER E'\x01'" \
        "no page of $2 has WEB_SCORE=$WEB_SCORE, WEB_LANGUAGE_SCORE=$WEB_LANGUAGE_SCORE; lower them."
}

web() {
    local settings made_with shard bytes=0 number=0
    settings="score >= $WEB_SCORE, language_score >= $WEB_LANGUAGE_SCORE"
    made_with=$(cat data/web.settings 2>/dev/null || echo "others")
    [ "$settings" = "$made_with" ] || ! compgen -G 'data/web_[0-9]*.txt' >/dev/null ||
        fail "data/web_*.txt were made with $made_with, not $settings; delete them, or set these as before."
    { echo "$settings" >data/web.settings; } 2>/dev/null || fail "data/ cannot be written to."
    while [ $bytes -lt $((WEB_MB * 1000000)) ]; do
        shard=$(printf 'data/web_%03d.txt' $number)
        [ -s "$shard" ] || write_slice $number "$shard"
        bytes=$((bytes + $(size "$shard")))
        number=$((number + 1))
    done
    echo "data/web_*.txt: $bytes bytes in $number files$([ -n "$duckdb" ] || echo "; nothing to fetch")."
}

# ------------------------------------------------------------------------------------------------------------
# 6. Words
# ------------------------------------------------------------------------------------------------------------
# A new word takes a function, its name in this list, and a line of the usage.
words="tiny, english, books, web, instructions, preferences, blimp, smollm2, all"

tiny() { get "$TINY_URL" data/tiny.txt 500000 20000000 text || fail "$problem"; }

# What script.py makes of the Python that runs.  -I: no module of the current folder stands in for one of Python's.
english() {
    "$python" -I -c 'import sys; sys.path.insert(0, sys.argv[1]); import script; script.make_english()' \
        "$(dirname -- "$0")" || fail "data/english.txt cannot be made; see above."
}

instructions() { get "$ALPACA_URL" data/instructions.json 1000 200000000 instructions || fail "$problem"; }

# records WORD PARQUET COLUMNS: data/WORD.jsonl, an object of these columns for each row of a data set's files.
#
# The names of files and columns are those that Hugging Face's pages of the two data sets give; tried with folders of
# such files (tests/test_fetch.py), not with huggingface.co.
records() { query "$DATASETS_URL/$2" "data/$1.jsonl" "COPY (SELECT $3 FROM read_parquet(getvariable('files')))"; }

# Pairs for train.py --evaluate.  BLiMP has a Parquet file for each of its 67 sets.
blimp() { records blimp 'nyu-mll/blimp@~parquet/**/*.parquet' 'sentence_good good, sentence_bad bad, UID AS name'; }

# The last message of each of two conversations is the answer that was preferred, or was not.
preferences() { records preferences 'HuggingFaceH4/ultrafeedback_binarized/data/train_prefs-*.parquet' \
    'prompt, chosen[-1].content AS chosen, rejected[-1].content AS rejected'; }

# The tensors come last, so a folder that has them is complete, and nobody asks again whether there is a
# template.  A model has it either in this file or, as the older form was, in tokenizer_config.json.
#
# Tried with a server on the same machine that holds small files of these forms, and that redirects, cuts,
# stalls and gives wrong answers (tests/test_fetch.py); not with huggingface.co, nor with the real 270 MB.
smollm2() {
    local folder=out/smollm2 name
    for name in config.json tokenizer.json tokenizer_config.json; do
        get "$SMOLLM2_URL/$name" $folder/$name 2 20000000 JSON || fail "$problem"
    done
    [ -s $folder/model.safetensors ] ||
        get "$SMOLLM2_URL/chat_template.jinja" $folder/chat_template.jinja 1 20000000 text ||
        [[ $problem == *"error: 404"* ]] || fail "$problem"
    get "$SMOLLM2_URL/model.safetensors" $folder/model.safetensors 1000000 1000000000 model || fail "$problem"
    echo "Talk to it: python chat.py --model $folder"
}

all() { books; web; instructions; }

[ $# -gt 0 ] || { echo "$usage" >&2; exit 2; }
case $1 in -h | --help) echo "$usage"; exit ;; esac
check FETCH_TIMEOUT "$FETCH_TIMEOUT" '[1-9][0-9]*' "a whole number of seconds, at least 1"
check FETCH_PAUSE "$FETCH_PAUSE" '[0-9]+' "a whole number of seconds"
check WEB_MB "$WEB_MB" '[1-9][0-9]{0,5}' "a whole number of megabytes, at least 1"
check WEB_SCORE "$WEB_SCORE" '[0-9]+([.][0-9]+)?' "a number, such as 3 or 3.5"
check WEB_LANGUAGE_SCORE "$WEB_LANGUAGE_SCORE" '[0-9]+([.][0-9]+)?' "a number from 0 to 1, such as 0.8"
check BOOK_IDS "${BOOK_IDS:-1}" '[[:space:],]*[0-9][0-9[:space:],]*' "Project Gutenberg's numbers"
for word in "$@"; do check WORD "$word" "${words//, /|}" "one of $words"; done
python=$venv/bin/python
[ -x "$python" ] || python=python3
tools=("$python")
[ "$*" = english ] || tools+=(curl)     # a machine without a network may lack it
for tool in "${tools[@]}"; do command -v "$tool" >/dev/null || fail "$tool is missing; install it."; done

# One run at a time, or two would write to one .part.  To make a folder succeeds for one run only, so a folder
# is the lock.  The folder that a killed run has left is no lock: the process that it names is gone.  A folder
# that names nobody is of a run that has started this very moment.
mkdir -p data 2>/dev/null && [ -w data ] || fail "data/ cannot be written to."
if ! mkdir $lock 2>/dev/null; then
    owner=$(cat $lock/owner 2>/dev/null || true)
    ! kill -0 "${owner:-$$}" 2>/dev/null ||
        fail "another run (process ${owner:-unknown}) is at work; wait for its end, or delete $lock."
fi
trap 'rm -rf $lock' EXIT
rm -f $lock/*                           # what the killed run has started may still be writing there
echo $$ >$lock/owner
for word in "$@"; do "$word"; done
