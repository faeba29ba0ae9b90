//! The program; its code is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    nightporter::main()
}
