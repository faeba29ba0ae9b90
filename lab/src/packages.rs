//! Debian's programs for guests: packages and all their dependencies, downloaded and unpacked (not
//! installed), and their files in an initramfs. Cached under `target/lab`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cpio::Archive;
use crate::image::cache_dir;
use crate::process::run;

/// Directories that no program of a guest reads, below the packages' root. An initramfs is memory
/// of the guest.
const LEFT_OUT: [&str; 14] = [
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/info",
    "usr/share/lintian",
    "usr/share/perl",
    "usr/share/perl5",
    "usr/share/X11",
    "usr/bin/perl",
    "usr/lib/x86_64-linux-gnu/perl",
    "usr/lib/x86_64-linux-gnu/libperl",
    // 31 MB of a plug-in's library, which Open MPI goes without.
    "usr/lib/x86_64-linux-gnu/libicu",
    "lib/systemd",
    "var/cache",
];

/// The files of these packages, and of all they depend on, in a directory of that name. They are
/// downloaded once; removing the directory gets newer ones.
///
/// # Errors
/// No network, or apt does not know one of them.
pub fn unpacked(name: &str, packages: &[&str]) -> Result<PathBuf> {
    let root = cache_dir().join(format!("root-{name}"));
    let wanted = packages.join(" ");
    let list = root.join(".packages");
    if fs::read_to_string(&list).is_ok_and(|had| had == wanted) {
        return Ok(root);
    }
    // Unpacked beside the final place and renamed, so that an interrupted download is not kept.
    let part = root.with_extension(format!("part{}", std::process::id()));
    let archives = part.join(".archives");
    fs::create_dir_all(archives.join("partial")).context("a directory for packages")?;
    download(packages, &part, &archives)?;
    for entry in fs::read_dir(&archives)? {
        let deb = entry?.path();
        if deb.extension().is_some_and(|extension| extension == "deb") {
            run("dpkg", &["-x", &deb.to_string_lossy(), &part.to_string_lossy()])?;
        }
    }
    fs::remove_dir_all(&archives)?;
    fs::write(part.join(".packages"), &wanted)?;
    let _ = fs::remove_dir_all(&root);
    fs::rename(&part, &root).with_context(|| format!("creating {}", root.display()))?;
    Ok(root)
}

/// apt is told that no package is installed, because this machine's packages do not count.
fn download(packages: &[&str], dir: &Path, archives: &Path) -> Result<()> {
    let status = dir.join(".status");
    fs::write(&status, "")?;
    let mut command = Command::new("apt-get");
    command.arg("-q").arg("-y").arg("--no-install-recommends").arg("--download-only");
    for (option, value) in [("Dir::State::status", &*status), ("Dir::Cache::archives", archives)] {
        command.arg("-o").arg(format!("{option}={}", value.display()));
    }
    // apt's own unprivileged user may not be allowed to write here.
    command.args(["-o", "APT::Sandbox::User=root", "-o", "Debug::NoLocking=1", "install"]);
    let out = command.args(packages).output().context("apt-get is not installed?")?;
    let error = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success(), "apt-get install {}: {}", packages.join(" "), error.trim());
    Ok(fs::remove_file(status)?)
}

/// Adds the tree below `root`, unchanged, except files that no program reads.
pub(crate) fn add_tree(archive: &mut Archive, root: &Path) -> Result<()> {
    add_below(archive, root, Path::new(""))
}

fn add_below(archive: &mut Archive, root: &Path, at: &Path) -> Result<()> {
    let dir = root.join(at);
    let entries = fs::read_dir(&dir).with_context(|| format!("listing {}", dir.display()))?;
    let mut names =
        entries.map(|entry| Ok(entry?.file_name())).collect::<Result<Vec<_>, std::io::Error>>()?;
    names.sort();
    for name in names {
        let (at, from) = (at.join(&name), dir.join(&name));
        let there = at.to_string_lossy();
        let is_left_out = LEFT_OUT.iter().any(|start| there.starts_with(start));
        if is_left_out || there.starts_with('.') {
            continue;
        }
        let metadata = fs::symlink_metadata(&from)?;
        if metadata.is_symlink() {
            archive.symlink(&there, &fs::read_link(&from)?.to_string_lossy());
        } else if metadata.is_dir() {
            archive.directory(&there);
            add_below(archive, root, &at)?;
        } else if metadata.is_file() {
            let content = fs::read(&from).with_context(|| from.display().to_string())?;
            archive.file_as(&there, metadata.permissions().mode(), &content);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_is_packed_with_its_links_but_without_its_manuals() {
        let root = std::env::temp_dir().join(format!("nightporter-tree-{}", std::process::id()));
        fs::create_dir_all(root.join("usr/share/man")).expect("made");
        fs::create_dir_all(root.join("usr/bin")).expect("made");
        fs::write(root.join("usr/share/man/page"), "a page").expect("written");
        fs::write(root.join("usr/bin/tool-1"), "a tool").expect("written");
        std::os::unix::fs::symlink("tool-1", root.join("usr/bin/tool")).expect("linked");
        let mut archive = Archive::default();
        add_tree(&mut archive, &root).expect("packed");
        let packed = String::from_utf8_lossy(&archive.finish()).into_owned();
        fs::remove_dir_all(&root).expect("removed");
        assert!(packed.contains("usr/bin/tool\0") && packed.contains("a tool"), "{packed}");
        assert!(!packed.contains("a page"), "{packed}");
    }
}
