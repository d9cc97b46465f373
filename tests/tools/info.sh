#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# attn-info: selection, orders, refusals and bad input, by exit status and text.
set -u
models=$1 info=$2 plugin=$3 opaque=${4:-}

. "$(dirname "$0")/expect.sh"

sed 's/"bfloat16"/"float32"/' "$models/llama-3.1-8b.json" >float32.json
expect 0 'cpu_ref' "$info"
expect 0 '"backends"' "$info" --json
expect 0 'usage' "$info" --help
expect 2 'usage' "$info" --no-such-option
expect 0 'terms: causal' "$info" --capabilities
expect 0 '"capabilities": {' "$info" --capabilities --json
if [ -n "$opaque" ]; then # by number, and by the name that its plugin gives
    expect 0 'vendor_codes: kv_dtype 0x10007 (tagged), layout 0x10008 (pages)' env ATTN_PLUGIN_PATH="$(realpath "$opaque")" "$info" --capabilities
fi
expect 0 'example could serve decode: declared rank -1' env ATTN_PLUGIN_PATH="$plugin" "$info" --explain --model float32.json
expect 0 '"eligible":' env ATTN_PLUGIN_PATH="$plugin" "$info" --explain --json --model float32.json
expect 0 'absorb -> attend latent -> project up' env ATTN_BACKEND=cpu_ref "$info" --explain --model "$models/deepseek-v3.json"
# A crowded folder does not displace the project's own plugins, and what is passed over is said.
crowd=$(mktemp -d)
for i in $(seq 100 399); do : >"$crowd/attn_$i.so"; done
expect 0 'passed over; 192 plugin files are the most here' env ATTN_PLUGIN_PATH="$crowd" "$info"
expect 0 '^  cpu_ref ' env ATTN_PLUGIN_PATH="$crowd" "$info"
rm -r "$crowd"
expect 2 'usage' "$info" stray
expect 1 'attn-info: output: ' sh -c '"$0" >/dev/full' "$info"
expect 1 'attn-info: output: ' sh -c '"$0" --json >/dev/full' "$info"
expect 1 'cannot be opened' "$info" --model no-such-file.json
# What attn-check enforces; docs/semantics.md has the same numbers.
expect 0 "held by attn-check to 0.02 of a row's root mean square + 0.012 of an element" "$info" --explain --model "$models/llama-3.1-8b.json"
expect 0 "held by attn-check to 4e-05 of a row's root mean square + 2e-05 of an element" "$info" --explain --model float32.json
expect 0 '"lse": 0.0078125' "$info" --json --model "$models/llama-3.1-8b.json"
# Equal layers are one line.
expect 0 '^    21 sliding .* 0, 2 \.\.\. 40$' "$info" --model "$models/gemma-2-9b.json"
expect 0 ' sliding .* 0-4, 6-10, .*\.\.\.$' "$info" --model "$models/gemma-3-27b.json"
expect 0 '^    32 full .* 0-31$' "$info" --model "$models/llama-3.1-8b.json"
expect 0 '^     1 full .*cpu_ref.*layers.3=cpu_ref *3: ' env ATTN_BACKEND='layers.3=cpu_ref' "$info" --model "$models/llama-3.1-8b.json"
expect 0 '"forced":' env ATTN_BACKEND=cpu_ref "$info" --json --model "$models/gpt-oss-20b.json"
expect 0 'sliding=cpu_ref' env ATTN_BACKEND='sliding=cpu_ref' "$info" --model "$models/gemma-2-9b.json"
expect 1 "did you mean 'cpu_ref'" env ATTN_BACKEND=cpu_rfe "$info" --model "$models/llama-3.1-8b.json"
expect 1 'dtype' env ATTN_PLUGIN_PATH="$plugin" ATTN_BACKEND=example "$info" --explain --model "$models/llama-3.1-8b.json"
expect 0 'mla  *cpu_ref' env ATTN_BACKEND=cpu_ref "$info" --explain --model "$models/deepseek-v3.json"
expect 1 'kernel attend_mla' env ATTN_PLUGIN_PATH="$plugin" ATTN_BACKEND=example "$info" --explain --model "$models/deepseek-v3.json"
expect 1 'kernel recurrent' env ATTN_PLUGIN_PATH="$plugin" ATTN_BACKEND=example "$info" --explain --model "$models/qwen3-next-80b-a3b.json"

# A page of all, whose table of layers has a row for each.
expect 0 'layers on' "$info" --model "$models/llama-3.1-8b.json" --capabilities --html page.html
expect 0 '<td>cpu_ref' cat page.html
expect 0 '^32 rows of layers$' python3 -c '
import html.parser, sys
class Page(html.parser.HTMLParser):
    rows, part = [], ""
    def handle_starttag(self, tag, attributes):
        self.part = tag
        if tag == "tr": self.rows.append([])
    def handle_data(self, data):
        if self.part == "td" and self.rows: self.rows[-1].append(data.strip())
page = Page()
page.feed(open(sys.argv[1]).read())
print(sum("full" in row for row in page.rows), "rows of layers")' page.html
expect 1 'absent/page: html: No such file' "$info" --html absent/page
# Half a page is removed; a device stays.
expect 1 'page.html: html: File too large' sh -c 'trap "" XFSZ; ulimit -f 1; "$@"' - "$info" --capabilities --html page.html
[ ! -e page.html ] || { echo 'half a page stays'; failed=1; }
ln -s /dev/full full.html
expect 1 'full.html: html: No space left' "$info" --html full.html
[ -h full.html ] || { echo 'a link to a device is removed'; failed=1; }
rm -f full.html

# Locks: written, compared, held by whatever binds; what cannot be written leaves nothing.
locks=$(mktemp -d)
llama=$models/llama-3.1-8b.json
expect 0 'layers on' "$info" --model "$llama" --lock "$locks/a"
expect 0 '' "$info" --model "$llama" --lock "$locks/same"
expect 0 'decode=cpu_ref' sh -c 'ATTN_BACKEND="layers.1=cpu_ref" "$1" --model "$2" --lock "$3" && cat "$3"' - "$info" "$llama" "$locks/b"
expect 0 '"same_choice": true' "$info" --json --diff "$locks/a" "$locks/same"
if "$info" | grep -q cpu_simd; then # else layer 1 is cpu_ref's in both
    expect 1 '^layer 1: decode=[^ ]* in .*/a, decode=cpu_ref in .*/b$' "$info" --diff "$locks/a" "$locks/b"
    expect 1 '"same_choice": false' "$info" --json --diff "$locks/a" "$locks/b"
fi
cat "$locks/a" "$locks/b" >"$locks/two"
expect 1 'the second lock has more models' "$info" --diff "$locks/a" "$locks/two"
head -c 1000 "$locks/a" >"$locks/cut"
expect 1 'cut: is cut short' "$info" --diff "$locks/a" "$locks/cut"
expect 1 'absent: No such file' "$info" --diff "$locks/absent" "$locks/a"
expect 1 'is no lock' "$info" --diff "$locks/a" "$llama"
expect 1 'is not a regular file' "$info" --diff "$locks/a" /dev/zero
expect 2 'needs two files' "$info" --diff "$locks/a"
expect 2 'attn-info: --diff writes no page$' "$info" --diff "$locks/a" "$locks/b" --html "$locks/page"
expect 2 'needs --model' "$info" --lock "$locks/a"
expect 1 'absent/a: lock: No such file' "$info" --model "$llama" --lock "$locks/absent/a"
expect 1 'a folder, not a file' "$info" --model "$llama" --lock "$locks/"
expect 1 'File too large' sh -c 'ulimit -f 1; "$@"' - "$info" --model "$llama" --lock "$locks/full"
expect 1 'ATTN_LOCK' "$info" --model "$llama" --lock /proc/lock
expect 1 'a layer has no backend' env ATTN_PLUGIN_PATH="$plugin" ATTN_BACKEND=example "$info" --model "$llama" --lock "$locks/unserved"
[ "$(ls -A "$locks" | tr '\n' ' ')" = 'a b cut same two ' ] || { ls -A "$locks"; failed=1; }
rm -r "$locks"

# One id for what lies alike, whatever reads it; another where blocks or rows lie otherwise; none without a cache.
layout() { ATTN_BACKEND=$1 "$info" --model "$models/$2.json" --layouts | sed -n 's/^      layout //p' | tr '\n' ' '; }
if "$info" | grep -q cpu_simd; then
    [ "$(layout cpu_simd gemma-2-9b)" = "$(layout cpu_simd@scalar gemma-2-9b)" ] || { echo 'one layout, two ids'; failed=1; }
    [ "$(layout cpu_simd gemma-2-9b)" != "$(layout cpu_ref gemma-2-9b)" ] || { echo 'two layouts, one id'; failed=1; }
fi
for model in qwen3-next-80b-a3b glm-5; do
    expect 0 ' layout [0-9a-f]\{32\}$' "$info" --model "$models/$model.json" --layouts
done
expect 0 '"layout_id": ""' "$info" --model "$models/whisper-large-v3.json" --layouts --json
expect 2 'needs --model' "$info" --layouts

expect 0 'attend latent and compressed' env ATTN_BACKEND=cpu_ref "$info" --explain --model "$models/deepseek-v4.json"
if "$info" | grep -q cpu_simd; then
    expect 0 'attend latent -> attend compressed -> merge' env ATTN_BACKEND=cpu_simd "$info" --explain --model "$models/deepseek-v4.json"
fi
sed 's/"deepseek_v4"/"deepseek_v41"/' "$models/deepseek-v4.json" >broken.json
expect 1 'model_type: deepseek_v41: indexes of two levels' "$info" --model broken.json
expect 1 'candidate_source_layer_id: 20; layers.20 lists 2048 blocks of 8 rows.*which no layer kind describes$' "$info" --model "$models/deepseek-v4.1.json"
# Heads of 512 next to windowed ones of 256; layers that read the caches of others; a bounded gate per channel next to MLA.
expect 0 '^    10 full  *cpu_ref  *cpu_ref' env ATTN_BACKEND=cpu_ref "$info" --model "$models/gemma-4.json"
expect 0 'dtype=2 heads=4 head_size=512 ' env ATTN_BACKEND=cpu_ref "$info" --model "$models/gemma-4.json" --layouts
sed 's/shared_layers": 0/shared_layers": 20/; s/k_eq_v": true/k_eq_v": false/' "$models/gemma-4.json" >broken.json
expect 0 'dtype=2 heads=16 head_size=512 ' env ATTN_BACKEND=cpu_ref "$info" --model broken.json --layouts
sed 's/shared_layers": 0/shared_layers": 60/' "$models/gemma-4.json" >broken.json
expect 1 'num_kv_shared_layers: 60; no layer before layers.0 has a cache' "$info" --model broken.json
sed 's/global_key_value_heads": 4/global_key_value_heads": 5/' "$models/gemma-4.json" >broken.json
expect 1 'num_global_key_value_heads: 5 does not divide num_attention_heads 32' "$info" --model broken.json
sed 's/"num_kv_shared_layers": 0/"per_layer_config": {"05": {"num_key_value_heads": 2}}/' "$models/gemma-4.json" >broken.json
expect 1 'per_layer_config: is not read; global_head_dim' "$info" --model broken.json
# Layers with lists do not read the caches of those without.
sed 's/"sparse_attention_config"/"num_kv_shared_layers": 57, "sparse_attention_config"/' "$models/minimax-m3.json" >broken.json
expect 1 'num_kv_shared_layers: 57; no layer before layers.3 has' "$info" --model broken.json
expect 0 '^    69 gdn (kda)  *cpu_ref  *cpu_ref' env ATTN_BACKEND=cpu_ref "$info" --model "$models/kimi-k3.json"
expect 0 '^    24 mla  *cpu_ref  *cpu_ref' env ATTN_BACKEND=cpu_ref "$info" --model "$models/kimi-k3.json"
sed 's/ratios": .0, 0,/ratios": [0, -1,/' "$models/deepseek-v4.json" >broken.json
expect 1 'compress_ratios: has no number from 0 to 1024 for layer 1' "$info" --model broken.json
sed 's/"sparse_num_index_heads": 4/"sparse_num_index_heads": 8/' "$models/minimax-m3.json" >broken.json
expect 1 'sparse_num_index_heads: 8; num_key_value_heads, 4, are allowed' "$info" --model broken.json
printf '{"model_type": "llama", "num_hidden_layers": 2' >broken.json
expect 1 'not a JSON object' "$info" --model broken.json
printf '{"model_type": "llama", "num_hidden_layers": 1e300, "hidden_size": 64, "num_attention_heads": 1}' >broken.json
expect 1 'num_hidden_layers' "$info" --model broken.json
printf '{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 7}' >broken.json
expect 1 'num_key_value_heads' "$info" --model broken.json
printf '{"model_type": "unheard_of", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2}' >broken.json
expect 0 "model_type 'unheard_of' is not known" "$info" --model broken.json
printf '{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "layer_types": ["full_attention", %s}' \
    '"mamba\u001b[2J"]' >broken.json
expect 1 "layer_types: layer 1 is 'mamba?\[2J'" "$info" --model broken.json
printf '{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "layer_types": ["full_attention"]}' >broken.json
expect 1 'layer_types: has 1 entries' "$info" --model broken.json
rm -f broken.json float32.json

# Names from outside reach the terminal, the log and JSON as text: no escape sequence, no forged line, no C1, valid UTF-8.
folder=$(mktemp -d)
name=$(printf 'attn_\033[31m\nattn warn: core: forged\302\233m\377.so')
: >"$folder/$name"
for form in "" --json; do
    ATTN_LOG=trace ATTN_PLUGIN_PATH=$folder "$info" $form >"$folder/out" 2>&1 || failed=1
    grep -q 'attn_' "$folder/out" || failed=1
    if LC_ALL=C grep -q "$(printf '[\001-\010\013-\037\177]\|\302[\200-\237]\|\377')" "$folder/out" || grep -q '^attn warn: core: forged' "$folder/out"; then
        echo "raw bytes of a file's name in attn-info $form"
        failed=1
    fi
done
# A core in a folder that is merely named core is an installed one: what lies next to it is not loaded.
mkdir -p "$folder/core" "$folder/plugins/x" "$folder/tools"
cp "$(dirname "$info")/../core/libattn.so.1" "$folder/core/"
cp "$info" "$folder/tools/"
cp "$plugin" "$folder/plugins/x/attn_example.so"
output=$(LD_LIBRARY_PATH=$folder/core "$folder/tools/attn-info" 2>&1)
if printf '%s' "$output" | grep -q "$folder/plugins"; then
    echo "a folder named core makes no build tree: $output"
    failed=1
fi
rm -rf "$folder"
exit $failed
