//! Writes manual pages and completions of all programs into a directory, for the Debian package:
//! `cargo run -p nightporter --example pages DIR`.

mod manual;

use std::fs::{File, OpenOptions, create_dir_all, write};
use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap_complete::Shell;
use clap_complete::env::Shells;
use clap_mangen::Man;

fn main() -> Result<()> {
    let dir = std::env::args_os().nth(1).map(PathBuf::from).context("which directory?")?;
    create_dir_all(&dir)?;
    let (daemon, tool) = (nightporterd::arguments::command(), nightporter::command());
    let booster = nightporter_boost::arguments::command();
    for program in [&daemon, &booster] {
        let mut page = File::create(dir.join(format!("{}.8", program.get_name())))?;
        Man::new(program.clone()).section("8").render(&mut page)?;
        page.write_all(manual::sections(program.get_name()).as_bytes())?;
    }
    // A page for each command.
    clap_mangen::generate_to(tool.clone(), &dir)?;
    let mut page = OpenOptions::new().append(true).open(dir.join("nightporter.1"))?;
    page.write_all(manual::sections("nightporter").as_bytes())?;
    for (command, examples) in nightporter::examples() {
        let name = format!("nightporter-{}.1", command.replace(' ', "-"));
        let page = OpenOptions::new().append(true).open(dir.join(&name)).context(name)?;
        (&page).write_all(manual::examples(examples).as_bytes())?;
        (&page).write_all(manual::sections("a command").as_bytes())?;
    }
    let keys = include_str!("../../../docs/configuration.md");
    let summary = "the configuration of nightporterd";
    let page = manual::of_markdown("nightporter.toml", 5, summary, keys);
    write(dir.join("nightporter.toml.5"), page)?;
    // The tool itself completes, because the names of ports are its daemon's.
    let shells = Shells::builtins();
    for (shell, file) in
        [("bash", "nightporter.bash"), ("zsh", "_nightporter"), ("fish", "nightporter.fish")]
    {
        let name = tool.get_name();
        let mut file = File::create(dir.join(file))?;
        let shell = shells.completer(shell).context("no such shell")?;
        shell.write_registration("COMPLETE", name, name, name, &mut file)?;
    }
    for mut program in [daemon, booster] {
        let name = program.get_name().to_owned();
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            clap_complete::generate_to(shell, &mut program, &name, &dir)?;
        }
    }
    Ok(())
}
