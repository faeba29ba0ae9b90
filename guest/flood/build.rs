//! Compiles the BPF program `np_flood` and finds libbpf to load it with. The rest needs neither:
//! without clang or the libraries the tool is built without `np_flood`, and reports that when it is
//! asked for it.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

const SOURCE: &str = "bpf/np_flood.bpf.c";
/// Linked statically, in this order: each needs those behind it.
const LIBRARIES: [&str; 3] = ["bpf", "elf", "z"];

fn main() {
    println!("cargo::rerun-if-changed={SOURCE}");
    println!("cargo::rerun-if-env-changed=CLANG");
    // Missing files are looked for again each time.
    println!("cargo::rerun-if-changed=/usr/bin/clang");
    println!("cargo::rerun-if-changed=/usr/lib/x86_64-linux-gnu/libbpf.a");
    println!("cargo::rustc-check-cfg=cfg(np_flood)");
    let libraries = PathBuf::from("/usr/lib/x86_64-linux-gnu"); // Debian's place
    match compile(&libraries) {
        Ok(()) => {
            println!("cargo::rustc-cfg=np_flood");
            println!("cargo::rustc-link-search=native={}", libraries.display());
            for library in LIBRARIES {
                println!("cargo::rustc-link-lib=static={library}");
            }
        }
        Err(missing) => println!(
            "cargo::warning=nightporter-guest is built without np_flood ({missing}): \
             install clang, libbpf-dev, libelf-dev and zlib1g-dev"
        ),
    }
}

fn compile(libraries: &Path) -> Result<(), String> {
    for library in LIBRARIES {
        let file = libraries.join(format!("lib{library}.a"));
        if !file.is_file() {
            return Err(format!("no {}", file.display()));
        }
    }
    let object = Path::new(&env::var("OUT_DIR").expect("cargo sets it")).join("np_flood.bpf.o");
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".to_owned());
    let output = Command::new(&clang)
        // Debug information is where libbpf finds the types; v3 is what Linux 5.1 and newer run.
        .args(["-O2", "-g", "-Wall", "-Werror", "-target", "bpf", "-mcpu=v3"])
        .args(["-I", "/usr/include/x86_64-linux-gnu", "-c", SOURCE, "-o"])
        .arg(&object)
        .output()
        .map_err(|error| format!("{clang}: {error}"))?;
    if output.status.success() {
        Ok(())
    } else {
        Err(format!("{clang}: {}", String::from_utf8_lossy(&output.stderr).replace('\n', " | ")))
    }
}
