//! `cuda/address.h` and `KvLayout::offset` are one rule: the header is compiled here, as C and as C++, and asked for
//! the offsets of random layouts.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use strata_types::{GroupId, KvLayout, KvShape};

const PROGRAM: &str = r#"
#include <stdio.h>
#include "address.h"
int main(void) {
    strata_layout layout;
    strata_u32 layer, part, page;
    if (sizeof(strata_layout) != 40) return 1;
    while (scanf("%llu %llu %llu %llu %llu %u %u %u", &layout.base, &layout.layer_stride, &layout.part_stride,
                 &layout.page_stride, &layout.piece_bytes, &layer, &part, &page) == 8)
        printf("%llu\n", strata_offset(layout, layer, part, page));
    return 0;
}
"#;

/// The first of these compilers that runs. Having none is a failure: the kernels' address rule would go untested.
fn compiler(variable: &str, names: &[&str]) -> String {
    let chosen = std::env::var(variable).ok();
    let works = |name: &&str| Command::new(name).arg("--version").stdout(Stdio::null()).status().is_ok();
    let found = chosen.as_deref().into_iter().chain(names.iter().copied()).find(works);
    found
        .unwrap_or_else(|| {
            panic!(
                "no compiler among ${variable}, {names:?}: install one (Debian: apt-get install g++; \
                 macOS: xcode-select --install) or name it in {variable}"
            )
        })
        .to_owned()
}

struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        // A leftover folder in the target directory harms nobody.
        let _gone_or_left = std::fs::remove_dir_all(&self.0);
    }
}

fn build(compiler: &str, language: &str, standard: &str, folder: &Path) -> PathBuf {
    let source = folder.join(format!("offsets-{language}"));
    std::fs::write(&source, PROGRAM).unwrap();
    let binary = folder.join(format!("offsets-{language}.run"));
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../cuda");
    let output = Command::new(compiler)
        .args(["-x", language, standard, "-O1", "-Wall", "-Wextra", "-Werror", "-pedantic", "-Wno-long-long"])
        .arg("-I")
        .arg(include)
        .arg(&source)
        .arg("-o")
        .arg(&binary)
        .output()
        .unwrap();
    assert!(output.status.success(), "{compiler}: {}", String::from_utf8_lossy(&output.stderr));
    binary
}

fn ask(binary: &Path, questions: &str) -> Vec<u64> {
    let mut child = Command::new(binary)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("what was just built");
    let mut input = child.stdin.take().unwrap();
    let questions = questions.to_owned();
    let writer = std::thread::spawn(move || input.write_all(questions.as_bytes()));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap().lines().map(|line| line.parse().unwrap()).collect()
}

fn layouts() -> impl Strategy<Value = KvLayout> {
    let sizes = (1u32..200, 1u32..3, 1u32..300, 1u32..20_000, 1u32..2_000_000);
    (sizes, any::<bool>(), prop::sample::select(vec![1u64, 64, 4096]), 0u64..1 << 40).prop_filter_map(
        "a pool of at most 2^62 bytes",
        |((layers, parts, page_size, words, pages), layer_first, alignment, base)| {
            let shape = KvShape::new(GroupId(0), layers, parts, page_size, words * 4).ok()?;
            let layout = if layer_first {
                KvLayout::layer_first(shape, pages).ok()?
            } else {
                KvLayout::page_first(shape, pages, alignment).ok()?
            };
            Some(KvLayout { base, ..layout })
        },
    )
}

#[test]
fn the_header_computes_the_offsets_of_kv_layout() {
    let mut runner = TestRunner::deterministic();
    let (mut questions, mut wanted) = (String::new(), Vec::new());
    for _ in 0..3000 {
        let layout = layouts().new_tree(&mut runner).unwrap().current();
        let KvLayout { shape, pages, base, layer_stride, part_stride, page_stride } = layout;
        let indices = (0..shape.layers, 0..shape.parts, 0..pages);
        let inside = indices.new_tree(&mut runner).unwrap().current();
        let last = (shape.layers - 1, shape.parts - 1, pages - 1);
        for (layer, part, page) in [(0, 0, 0), inside, last] {
            let piece = shape.piece_bytes();
            questions.push_str(&format!(
                "{base} {layer_stride} {part_stride} {page_stride} {piece} {layer} {part} {page}\n"
            ));
            wanted.push(layout.offset(layer, part, page));
        }
    }
    assert!(wanted.iter().filter(|offset| **offset > u64::from(u32::MAX)).count() > 1000);
    let name = format!("address-{}", std::process::id());
    let folder = Folder(Path::new(env!("CARGO_TARGET_TMPDIR")).join(name));
    std::fs::create_dir_all(&folder.0).unwrap();
    let cpp = build(&compiler("CXX", &["c++", "g++", "clang++"]), "c++", "-std=c++14", &folder.0);
    let c = build(&compiler("CC", &["cc", "gcc", "clang"]), "c", "-std=c99", &folder.0);
    for binary in [cpp, c] {
        assert_eq!(ask(&binary, &questions), wanted, "{}", binary.display());
    }
}
