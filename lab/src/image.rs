//! What a guest boots: Debian's kernel by package download (not installed), and an initramfs that
//! holds `nightporter-lab-guest` as its init, `nightporter-guest` and the virtio modules. Cached
//! under `target/lab`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cpio::Archive;
use crate::process::run;

/// The metapackage that depends on Debian's current cloud kernel.
const KERNEL_METAPACKAGE: &str = "linux-image-cloud-amd64";

/// Modules a QEMU guest needs for its NICs, in load order. (Found by loading them one by one in
/// Debian 12's 6.1 cloud kernel.)
const MODULES: [&str; 8] = [
    "drivers/virtio/virtio_ring",
    "drivers/virtio/virtio",
    "net/core/failover",
    "drivers/net/net_failover",
    "drivers/net/virtio_net",
    "drivers/virtio/virtio_pci_modern_dev",
    "drivers/virtio/virtio_pci_legacy_dev",
    "drivers/virtio/virtio_pci",
];

/// What Debian's user-mode Linux does not have built in, in load order.
const UML_MODULES: [&str; 3] =
    ["net/core/failover", "drivers/net/net_failover", "drivers/net/virtio_net"];

/// `nightporter-guest` in a guest.
pub const GUEST_TOOL: &str = "/bin/nightporter-guest";

const UML: &str = "/usr/bin/linux.uml";
const UML_MODULE_BASE: &str = "/usr/lib/uml/modules";

/// A bootable guest.
#[derive(Debug, Clone)]
pub struct Image {
    /// bzImage for QEMU; the executable itself for user-mode Linux.
    pub kernel: PathBuf,
    /// Initramfs with the modules for `kernel`.
    pub initramfs: PathBuf,
    /// The guest's tool has `np_flood`: there was what it takes to build it.
    pub np_flood: bool,
}

/// Why a guest's tool has no `np_flood`.
pub const NO_NP_FLOOD: &str = "no clang, libbpf-dev, libelf-dev or zlib1g-dev here";

/// The top of the source tree.
#[must_use]
pub fn source_root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the lab is a directory of the tree")
}

/// Where the lab keeps what is expensive to make: `target/lab`.
#[must_use]
pub fn cache_dir() -> PathBuf {
    source_root().join("target/lab")
}

/// Where guests' consoles and programs' logs of the last run of this name are: under
/// `target/lab/log`.
///
/// # Errors
/// It cannot be made.
pub fn log_dir(run: &str) -> Result<PathBuf> {
    let dir = cache_dir().join("log").join(run);
    fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
    Ok(dir)
}

impl Image {
    /// For QEMU: downloads, builds and packs what is not there yet.
    ///
    /// # Errors
    /// No network, no cargo, or a kernel package without the expected modules.
    pub fn for_qemu() -> Result<Self> {
        let cache = cache_dir();
        fs::create_dir_all(&cache).with_context(|| format!("creating {}", cache.display()))?;
        let dir = cache.join("kernel");
        if !dir.is_dir() {
            download_kernel(&dir)?;
        }
        let kernel = only(&dir.join("boot"), "vmlinuz-")?;
        let modules = modules(&dir.join("lib/modules"), &MODULES)?;
        Self::pack(kernel, cache.join("initramfs"), &modules)
    }

    /// For user-mode Linux, which has to be installed.
    ///
    /// # Errors
    /// It is not, or no cargo, or modules missing.
    pub fn for_uml() -> Result<Self> {
        let kernel = PathBuf::from(UML);
        ensure!(kernel.is_file(), "no {UML}: install user-mode-linux");
        let modules = modules(Path::new(UML_MODULE_BASE), &UML_MODULES)?;
        Self::pack(kernel, cache_dir().join("initramfs-uml"), &modules)
    }

    fn pack(kernel: PathBuf, initramfs: PathBuf, modules: &[PathBuf]) -> Result<Self> {
        let built = |package, binary| guest_binary(package, binary, &cache_dir().join("guest"));
        let read =
            |file: &Path| fs::read(file).with_context(|| format!("reading {}", file.display()));
        let agent = built("nightporter-guest", "nightporter-lab-guest")?;
        let tool = built("nightporter-flood", "nightporter-guest")?;
        write_whole(&initramfs, &pack_initramfs(&read(&agent)?, &read(&tool)?, modules)?)?;
        let version = run(&tool.to_string_lossy(), &["--version"])?;
        Ok(Self { kernel, initramfs, np_flood: version.contains(" with np_flood") })
    }
}

/// The module files, which must exist, below `base`'s only kernel version.
fn modules(base: &Path, names: &[&str]) -> Result<Vec<PathBuf>> {
    let kernel = only(base, "")?.join("kernel");
    let files: Vec<PathBuf> = names.iter().map(|m| kernel.join(format!("{m}.ko"))).collect();
    for file in &files {
        ensure!(file.is_file(), "no kernel module {}", file.display());
    }
    Ok(files)
}

/// The entry of `dir` whose name starts like that.
fn only(dir: &Path, start: &str) -> Result<PathBuf> {
    fs::read_dir(dir)
        .with_context(|| format!("listing {}", dir.display()))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(start)))
        .with_context(|| format!("no {start}* in {}; remove it to start over", dir.display()))
}

/// The unpacked kernel package, downloaded once. Removing `dir` gets a newer one.
fn download_kernel(dir: &Path) -> Result<()> {
    let depends = run("apt-cache", &["depends", "--important", KERNEL_METAPACKAGE])?;
    let package = depends
        .lines()
        .find_map(|line| line.trim().strip_prefix("Depends: linux-image-"))
        .map(|rest| format!("linux-image-{rest}"))
        .with_context(|| format!("apt knows no {KERNEL_METAPACKAGE}; run `apt-get update`"))?;
    // Unpack beside the final place and rename, so that an interrupted download is not kept.
    let unpacked = dir.with_extension("part");
    let _ = fs::remove_dir_all(&unpacked);
    fs::create_dir_all(&unpacked)?;
    let mut download = Command::new("apt-get");
    // apt's own unprivileged user may not be allowed to write here.
    download.args(["-q", "-o", "APT::Sandbox::User=root", "download", &package]);
    let out = download.current_dir(&unpacked).output().context("apt-get is not installed?")?;
    let error = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success(), "apt-get download {package}: {}", error.trim());
    let deb = fs::read_dir(&unpacked)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|e| e == "deb"))
        .context("apt-get download left no .deb")?;
    run("dpkg", &["-x", &deb.to_string_lossy(), &unpacked.to_string_lossy()])?;
    fs::remove_file(&deb)?;
    fs::rename(&unpacked, dir).with_context(|| format!("creating {}", dir.display()))
}

/// Builds a program for guests as one static file: their initramfs has no libraries. The profile is
/// the lab's own, and so are the dependencies; only the last link differs, and has a target
/// directory of its own. When nothing changed this takes no time.
fn guest_binary(package: &str, binary: &str, target_dir: &Path) -> Result<PathBuf> {
    let profile = if cfg!(debug_assertions) { "sim" } else { "release" };
    let shared = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    let shared = source_root().join(shared.unwrap_or_else(|| "target".into()));
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let mut build = Command::new(&cargo);
    build
        .args(["rustc", "--quiet", "--locked", "--profile", profile, "--package", package])
        .args(["--bin", binary, "--target-dir"])
        .arg(target_dir)
        .args(["--", "-C", "target-feature=+crt-static", "-C", "strip=symbols"])
        .env("CARGO_BUILD_BUILD_DIR", shared)
        .current_dir(source_root());
    let out = build.output().with_context(|| format!("{cargo} is not installed?"))?;
    let error = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success(), "building {binary}: {}", error.trim());
    Ok(target_dir.join(profile).join(binary))
}

fn pack_initramfs(agent: &[u8], tool: &[u8], modules: &[PathBuf]) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    archive.directory("dev");
    archive.character_device("dev/console", 5, 1);
    archive.directory("modules");
    for (order, path) in modules.iter().enumerate() {
        let name = path.file_name().context("a module has a name")?.to_string_lossy();
        let content = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
        archive.file(&format!("modules/{order:02}-{name}"), &content);
    }
    archive.directory("bin");
    archive.file(&GUEST_TOOL[1..], tool);
    archive.file("init", agent);
    Ok(archive.finish())
}

/// Replaces a file in one step: another run may be booting from it.
fn write_whole(path: &Path, content: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|old| old == content) {
        return Ok(());
    }
    let part = path.with_extension(format!("part{}", std::process::id()));
    fs::write(&part, content).with_context(|| format!("writing {}", part.display()))?;
    fs::rename(&part, path).with_context(|| format!("creating {}", path.display()))
}
