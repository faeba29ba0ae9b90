//! The code in `bpf/turn.txt` is what clang makes of `bpf/turn.bpf.c`.
//!
//! `NIGHTPORTER_BLESS=1` writes it anew.

use std::io::Write;
use std::path::Path;
use std::process::Command;

use nightporter_attach::code::{self, Code, Program};

/// The clang that made the text: others may choose other registers.
const CLANG: &str = "14";

#[test]
fn the_code_is_what_clang_makes_of_the_source() {
    let version = Command::new("clang").arg("-dumpversion").output();
    let version = version.map(|it| String::from_utf8(it.stdout).unwrap()).unwrap_or_default();
    if version.split('.').next() != Some(CLANG) {
        // Past libtest's capture: `.ci/test` counts such lines.
        let why = format!("the code of attach beside its source: no clang {CLANG} here");
        let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
        return;
    }
    let text = [Program::TurnFromVm, Program::Only, Program::Back].map(|program| {
        let name = program.name();
        format!("{name}:\n{}", section(&compile(), name).to_text())
    });
    if std::env::var_os("NIGHTPORTER_BLESS").is_some() {
        std::fs::write(crate_dir().join("bpf/turn.txt"), text.concat()).unwrap();
    } else {
        assert_eq!(text.concat(), code::TEXT, "left: the source; right: the text");
    }
}

fn crate_dir() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// An object file.
fn compile() -> Vec<u8> {
    let mut clang = Command::new("clang");
    let clang = clang.args(["-O2", "-Wall", "-Werror", "-target", "bpf", "-mcpu=v3"]);
    let clang = clang.args(["-I", "/usr/include/x86_64-linux-gnu", "-c", "-o", "-"]);
    let output = clang.arg("bpf/turn.bpf.c").current_dir(crate_dir()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// The code of a section. The numbers are those of ELF's headers of 64 bits, little-endian.
fn section(object: &[u8], name: &str) -> Code {
    let number = |at: usize, len: usize| {
        let bytes = object[at..at + len].iter().rev();
        bytes.fold(0, |sum, byte| sum << 8 | usize::from(*byte))
    };
    let (headers, size, count) = (number(40, 8), number(58, 2), number(60, 2));
    let header = |place: usize| headers + place * size;
    let names = number(header(number(62, 2)) + 24, 8);
    let found = (0..count).map(header).find(|header| {
        let at = names + number(*header, 4);
        object[at..].split(|byte| *byte == 0).next() == Some(name.as_bytes())
    });
    let header = found.unwrap_or_else(|| panic!("no section {name}"));
    let (at, len) = (number(header + 24, 8), number(header + 32, 8));
    Code::from_bytes(&object[at..at + len])
}
