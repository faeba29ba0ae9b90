//! The files beside the configuration file: `conf.d/*.toml`, in the order of their names. They have
//! ports alone, so they are read behind the file as if they stood in it.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

use super::reader::{Document, Place, Problem, Problems};

/// The directory of these files, beside the configuration file.
const DIR: &str = "conf.d";
/// The sections that they may have.
const SECTIONS: [&str; 6] = ["uplink", "overlay", "vm", "attach", "station", "toe_rule"];

/// All files, one behind the other.
#[derive(Debug, Default)]
pub(super) struct Texts {
    pub(super) text: String,
    /// The lines of the text before each file, and the file's name, behind the first.
    begins: Vec<(usize, String)>,
}

impl Texts {
    /// The file at `path`, and those beside it.
    ///
    /// # Errors
    /// One cannot be read; or has something else than ports.
    pub(super) fn read(path: &Path) -> Result<Self, Problems> {
        let mut texts = Self { text: read(path, path)?, ..Self::default() };
        let files = files(path)?;
        if !files.is_empty() {
            parse_alone(path, &texts.text)?;
        }
        for file in files {
            let more = read(path, &file)?;
            check(&file, &more)?;
            if !texts.text.ends_with('\n') {
                texts.text.push('\n');
            }
            let lines = texts.text.bytes().filter(|byte| *byte == b'\n').count();
            texts.begins.push((lines, file.display().to_string()));
            texts.text += &more;
        }
        Ok(texts)
    }

    /// Each problem in the file that it is in.
    pub(super) fn locate(&self, mut problems: Problems) -> Problems {
        for problem in &mut problems.list {
            let Place::Line(line) = problem.place else { continue };
            let of = self.begins.iter().rev().find(|(before, _)| line > *before);
            if let Some((before, file)) = of {
                problem.place = Place::Beside(file.clone(), line - before);
            }
        }
        problems
    }
}

fn read(path: &Path, file: &Path) -> Result<String, Problems> {
    std::fs::read_to_string(file).map_err(|e| {
        let is_beside = file != path;
        let shown = file.display().to_string();
        let fix = match is_beside {
            _ if e.kind() == ErrorKind::InvalidData => "save it as UTF-8",
            true => "let the daemon's user read it, or remove it",
            false => "give the path of a readable file: nightporterd --config FILE",
        };
        problem((&shown, 1), format!("cannot read the file: {e}"), fix)
    })
}

/// The directory of the configuration file, as its path is written; `conf.d` is in it.
pub(crate) fn of_file(path: &Path) -> &Path {
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    }
}

/// The files of the directory; none if there is no directory.
fn files(path: &Path) -> Result<Vec<PathBuf>, Problems> {
    let dir = of_file(path).join(DIR);
    let failed = |e: std::io::Error| {
        let what = format!("cannot read the directory: {e}");
        let fix = "let the daemon's user read it, or remove it";
        problem((&dir.display().to_string(), 1), what, fix)
    };
    let entries = match std::fs::read_dir(&dir) {
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(Vec::new());
        }
        entries => entries.map_err(failed)?,
    };
    let mut files = Vec::new();
    for entry in entries {
        let file = entry.map_err(failed)?.path();
        let is_hidden = file.file_name().is_some_and(|name| name.as_encoded_bytes()[0] == b'.');
        if file.extension().is_some_and(|it| it == "toml") && !is_hidden {
            files.push(file);
        }
    }
    files.sort();
    Ok(files)
}

/// A string or list that has no end in its own file would have one in the next.
fn parse_alone(file: &Path, text: &str) -> Result<(), Problems> {
    let (overrides, file) = (BTreeMap::new(), file.display().to_string());
    let list = Document::parse(text, &overrides).problems;
    if list.is_empty() { Ok(()) } else { Err(Problems { file, list }) }
}

/// A key before the first section would be one of the file before.
fn check(file: &Path, text: &str) -> Result<(), Problems> {
    parse_alone(file, text)?;
    let (root, _) = DeTable::parse_recoverable(text);
    let is_port = |key: &str, value: &DeValue<'_>| {
        SECTIONS.contains(&key) && matches!(value, DeValue::Array(_))
    };
    let root = root.into_inner();
    let other = root.iter().find(|(key, value)| !is_port(key.get_ref(), value.get_ref()));
    other.map_or(Ok(()), |(key, _)| {
        let line = 1 + text[..key.span().start].matches('\n').count();
        let what = format!("\"{}\" is not for a file in {DIR}", key.get_ref());
        let fix = "write [[vm]] or [[uplink]] above the keys; all else belongs in the file itself";
        Err(problem((&file.display().to_string(), line), what, fix))
    })
}

fn problem((file, line): (&str, usize), what: String, fix: &str) -> Problems {
    let place = Place::Line(line);
    let list = vec![Problem { place, key: String::new(), what, fix: fix.into() }];
    Problems { file: file.into(), list }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    /// A directory of its own, which goes with it.
    struct Dir(PathBuf);

    impl Dir {
        fn new(name: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("np-beside-{}-{name}", std::process::id()));
            std::fs::create_dir_all(dir.join(DIR)).unwrap();
            Self(dir)
        }

        fn write(&self, file: &str, text: &str) {
            std::fs::write(self.0.join(file), text).unwrap();
        }

        fn load(&self) -> Result<Vec<String>, String> {
            let config = Config::load(&self.0.join("np.toml"), &BTreeMap::new());
            let names = |it: Config| it.vms.into_iter().map(|vm| vm.name).collect();
            config
                .map(names)
                .map_err(|problems| problems.to_string().replace(&self.0.display().to_string(), ""))
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn files_beside_are_read_in_order_and_mistakes_are_found_in_them() {
        let dir = Dir::new("order");
        dir.write("np.toml", "[[vm]]\nname = \"a\""); // without an end of its line
        dir.write("conf.d/20.toml", "[[vm]]\nname = \"c\"\n");
        dir.write("conf.d/10.toml", "# b\n[[vm]]\nname = \"b\"\n");
        dir.write("conf.d/30.toml.old", "nonsense");
        dir.write("conf.d/.40.toml", "nonsense");
        assert_eq!(dir.load(), Ok(vec!["a".into(), "b".into(), "c".into()]));
        dir.write("conf.d/20.toml", "[[vm]]\nname = \"c\"\nmtu = 1\n");
        let said = dir.load().unwrap_err();
        assert!(said.starts_with("/conf.d/20.toml:3: vm.c.mtu: 1 is outside"), "{said}");
        dir.write("np.toml", "[[vm]]\nname = \"a\"\nmtu = 2");
        assert!(dir.load().unwrap_err().starts_with("/np.toml:3: vm.a.mtu: 2 is outside"));
    }

    #[test]
    fn a_string_without_an_end_is_found_in_its_own_file() {
        let dir = Dir::new("alone");
        let (good, bad) = ("[[vm]]\nname = \"a\"\n", "[[vm]]\nips = [\"192.0.2.1\",\n");
        let files = ["np.toml", "conf.d/10.toml", "conf.d/20.toml"];
        for file in files {
            files.iter().for_each(|it| dir.write(it, ""));
            dir.write("np.toml", good);
            dir.write(file, bad);
            let said = dir.load().unwrap_err();
            let expected = format!("/{file}:");
            assert!(said.lines().all(|line| !line.starts_with('/') || line.starts_with(&expected)));
            assert!(said.starts_with(&expected) && said.contains("not valid TOML"), "{said}");
        }
    }

    #[test]
    fn a_file_beside_has_ports_alone() {
        let dir = Dir::new("ports");
        dir.write("np.toml", "[[vm]]\nname = \"a\"\n");
        for (text, key) in [
            ("# b\nmtu = 9000\n", "mtu"),
            ("\n[daemon]\ncpu = 1\n", "daemon"),
            ("\n[vm]\nname = \"b\"\n", "vm"),
        ] {
            dir.write("conf.d/b.toml", text);
            let said = dir.load().unwrap_err();
            let expected = format!("/conf.d/b.toml:2: \"{key}\" is not for a file in conf.d");
            assert!(said.starts_with(&expected), "{said}");
        }
    }
}
