//! The boot image of a guest: Debian's kernel by package download (not installed), and an initramfs
//! that holds `nightporter-lab-guest` as its init, `nightporter-guest` and the virtio modules; on
//! demand the virtual TOE's part too. Cached under `target/lab`.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cpio::Archive;
use crate::packages;
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

/// Modules that Debian's user-mode Linux does not have built in, in load order.
const UML_MODULES: [&str; 3] =
    ["net/core/failover", "drivers/net/net_failover", "drivers/net/virtio_net"];

/// Further modules for the socket device.
const SOCKET_MODULES: [&str; 3] = [
    "net/vmw_vsock/vsock",
    "net/vmw_vsock/vmw_vsock_virtio_transport_common",
    "net/vmw_vsock/vmw_vsock_virtio_transport",
];

/// Further modules of user-mode Linux for a guest that forwards to containers, over links with a
/// rate and losses. The bridge needs IPv6.
const ROUTER_MODULES: [&str; 8] = [
    "lib/crc-ccitt",
    "net/ipv6/ipv6",
    "drivers/net/veth",
    "net/llc/llc",
    "net/802/stp",
    "net/bridge/bridge",
    "net/sched/sch_tbf",
    "net/sched/sch_netem",
];

/// Further ones for one that translates addresses, too.
const NAT_MODULES: [&str; 9] = [
    "net/ipv4/netfilter/nf_defrag_ipv4",
    "net/ipv6/netfilter/nf_defrag_ipv6",
    "net/netfilter/nf_conntrack",
    "net/netfilter/nf_nat",
    "net/netfilter/x_tables",
    "net/ipv4/netfilter/ip_tables",
    "net/ipv4/netfilter/iptable_nat",
    "net/netfilter/xt_nat",
    "net/netfilter/xt_MASQUERADE",
];

/// Debian's iptables, as of the old kernel interface, and what of its package that needs.
const IPTABLES_FILES: [&str; 7] = [
    "usr/sbin/xtables-legacy-multi",
    "usr/lib/x86_64-linux-gnu/libxtables.so.12",
    "usr/lib/x86_64-linux-gnu/libip4tc.so.2",
    "usr/lib/x86_64-linux-gnu/libip6tc.so.2",
    "usr/lib/x86_64-linux-gnu/xtables/libxt_standard.so",
    "usr/lib/x86_64-linux-gnu/xtables/libxt_DNAT.so",
    "usr/lib/x86_64-linux-gnu/xtables/libxt_MASQUERADE.so",
];
/// The program in a guest that translates addresses; its first argument is `iptables`.
pub const IPTABLES: &str = "/usr/sbin/xtables-legacy-multi";

/// iproute2's programs in a guest that forwards.
pub const IP: &str = "/bin/ip";
/// Likewise.
pub const TC: &str = "/bin/tc";

/// The virtual TOE's library in a guest.
pub const TOE_LIBRARY: &str = "/lib/libnightporter_toe.so";
/// Its launcher.
pub const TOE_LAUNCHER: &str = "/bin/nightporter-toe";
/// The program that tests sockets.
pub const TOE_SUITE: &str = "/bin/nightporter-toe-suite";
/// One end of connections.
pub const PEER: &str = "/bin/nightporter-lab-peer";

/// `nightporter-guest` in a guest.
pub const GUEST_TOOL: &str = "/bin/nightporter-guest";

/// rustc's flags for single files, and from the third on for all.
const STATIC: [&str; 4] = ["-C", "target-feature=+crt-static", "-C", "strip=symbols"];

const UML: &str = "/usr/bin/linux.uml";
const UML_MODULE_BASE: &str = "/usr/lib/uml/modules";

/// A bootable guest.
#[derive(Debug, Clone)]
pub struct Image {
    /// bzImage for QEMU; the executable itself for user-mode Linux.
    pub kernel: PathBuf,
    /// A library that `kernel` needs, if it is an executable (`nightporter-uml`).
    pub preload: Option<PathBuf>,
    /// Initramfs with the modules for `kernel`.
    pub initramfs: PathBuf,
    /// The guest's tool has `np_flood`: its build dependencies were there.
    pub np_flood: bool,
    /// The modules for `kernel`.
    modules: PathBuf,
}

#[cfg(test)]
impl Image {
    /// One that cannot be booted.
    pub(crate) fn without_files() -> Self {
        let [kernel, initramfs, modules] = ["kernel", "initramfs", "modules"].map(PathBuf::from);
        Self { kernel, preload: None, initramfs, np_flood: false, modules }
    }
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
        Self::pack(kernel, cache.join("initramfs"), dir.join("lib/modules"), &MODULES)
    }

    /// For user-mode Linux, which has to be installed.
    ///
    /// # Errors
    /// It is not, or no cargo, or modules missing.
    pub fn for_uml() -> Result<Self> {
        let kernel = PathBuf::from(UML);
        ensure!(kernel.is_file(), "no {UML}: install user-mode-linux");
        let preload = built("nightporter-uml", Artifact::Library("libnightporter_uml.so"))?;
        let modules = PathBuf::from(UML_MODULE_BASE);
        let image = Self::pack(kernel, cache_dir().join("initramfs-uml"), modules, &UML_MODULES)?;
        Ok(Self { preload: Some(preload), ..image })
    }

    /// The guests' tool, which runs here as well.
    ///
    /// # Errors
    /// No cargo.
    pub(crate) fn guest_tool() -> Result<PathBuf> {
        built("nightporter-flood", Artifact::Program("nightporter-guest"))
    }

    fn pack(
        kernel: PathBuf,
        initramfs: PathBuf,
        modules: PathBuf,
        needed: &[&str],
    ) -> Result<Self> {
        let agent = built("nightporter-guest", Artifact::Program("nightporter-lab-guest"))?;
        let tool = Self::guest_tool()?;
        let files = module_files(&modules, needed)?;
        write_whole(&initramfs, &pack_initramfs(&read(&agent)?, &read(&tool)?, &files)?)?;
        let version = run(&tool.to_string_lossy(), &["--version"])?;
        let np_flood = version.contains(" with np_flood");
        Ok(Self { kernel, preload: None, initramfs, np_flood, modules })
    }

    /// The same with what a guest needs for sockets over its host: modules, library, launcher, the
    /// programs that try them, and this machine's libc for these.
    ///
    /// # Errors
    /// No cargo, no ldd, or modules missing.
    pub fn with_sockets(&self) -> Result<Self> {
        let files = module_files(&self.modules, &SOCKET_MODULES)?;
        let toe = "nightporter-toe";
        let launcher = built(toe, Artifact::Program("nightporter-toe"))?;
        let dynamic = [
            (TOE_LIBRARY, built(toe, Artifact::Library("libnightporter_toe.so"))?),
            (TOE_SUITE, built(toe, Artifact::Dynamic("nightporter-toe-suite"))?),
            (PEER, built("nightporter-guest", Artifact::Dynamic("nightporter-lab-peer"))?),
        ];
        let mut archive = Archive::default();
        for (order, path) in files.iter().enumerate() {
            add_module(&mut archive, 90 + order, path)?;
        }
        archive.directory("tmp");
        archive.file(&TOE_LAUNCHER[1..], &read(&launcher)?);
        add_dynamic(&mut archive, dynamic)?;
        self.and(archive, "sockets")
    }

    /// The same, of user-mode Linux, with what a guest needs that forwards: modules, this machine's
    /// iproute2, and the program of its containers.
    ///
    /// # Errors
    /// No iproute2, no cargo, no ldd, or modules missing.
    pub fn with_router(&self) -> Result<Self> {
        let mut archive = Archive::default();
        let files = module_files(&self.modules, &ROUTER_MODULES)?;
        for (order, path) in files.iter().enumerate() {
            add_module(&mut archive, 40 + order, path)?;
        }
        let peer = built("nightporter-guest", Artifact::Dynamic("nightporter-lab-peer"))?;
        add_dynamic(&mut archive, [(IP, installed("ip")?), (TC, installed("tc")?), (PEER, peer)])?;
        self.and(archive, "router")
    }

    /// [`Self::with_router`], with Debian's iptables, which is downloaded.
    ///
    /// # Errors
    /// As there; or no network.
    pub fn with_nat(&self) -> Result<Self> {
        let root = packages::unpacked("nat", &["iptables"])?;
        let mut archive = Archive::default();
        let files = module_files(&self.modules, &NAT_MODULES)?;
        for (order, path) in files.iter().enumerate() {
            add_module(&mut archive, 60 + order, path)?;
        }
        for directory in ["run", "usr", "usr/sbin", "usr/lib", "usr/lib/x86_64-linux-gnu"] {
            archive.directory(directory);
        }
        archive.directory("usr/lib/x86_64-linux-gnu/xtables");
        for file in IPTABLES_FILES {
            archive.file_as(file, 0o755, &read(&root.join(file))?);
        }
        self.with_router()?.and(archive, "nat")
    }

    /// The same with programs of Debian: these packages, and all that they depend on. `name` is
    /// what the set is called.
    ///
    /// # Errors
    /// No network, or apt does not know one of them.
    pub fn with_packages(&self, name: &str, packages: &[&str]) -> Result<Self> {
        let root = packages::unpacked(name, packages)?;
        let mut archive = Archive::default();
        packages::add_tree(&mut archive, &root)?;
        self.and(archive, name)
    }

    /// The same with one program more.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn with_program(&self, at: &str, program: &Path) -> Result<Self> {
        let mut archive = Archive::default();
        archive.file(&below_root(Path::new(at)), &read(program)?);
        self.and(archive, "one")
    }

    /// The kernel unpacks one archive after the other.
    fn and(&self, archive: Archive, name: &str) -> Result<Self> {
        let before = self.initramfs.file_name().context("a file has a name")?.to_string_lossy();
        let initramfs = self.initramfs.with_file_name(format!("{before}.{name}"));
        write_whole(&initramfs, &[read(&self.initramfs)?, archive.finish()].concat())?;
        Ok(Self { initramfs, ..self.clone() })
    }
}

fn read(file: &Path) -> Result<Vec<u8>> {
    fs::read(file).with_context(|| format!("reading {}", file.display()))
}

fn below_root(path: &Path) -> String {
    path.to_string_lossy().trim_start_matches('/').to_owned()
}

/// Adds programs and libraries by their names in the guest, with the libraries that they need.
fn add_dynamic<const N: usize>(archive: &mut Archive, files: [(&str, PathBuf); N]) -> Result<()> {
    let mut all: Vec<_> = files.map(|(name, from)| (PathBuf::from(name), from)).into();
    let libraries = libraries(all.iter().map(|(_, from)| from.as_path()))?;
    all.extend(libraries.into_iter().map(|library| (library.clone(), library)));
    let directories = all.iter().flat_map(|(name, _)| name.ancestors().skip(1));
    let directories: BTreeSet<_> = directories.filter(|dir| dir.parent().is_some()).collect();
    // Parents sort before their children.
    directories.iter().for_each(|dir| archive.directory(&below_root(dir)));
    for (name, from) in &all {
        archive.file(&below_root(name), &read(from)?);
    }
    Ok(())
}

/// A program of this machine.
fn installed(name: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/sbin", "/sbin"].map(PathBuf::from); // not in everybody's path
    let mut all = std::env::split_paths(&path).chain(usual).map(|dir| dir.join(name));
    all.find(|file| file.is_file()).with_context(|| format!("no {name}: install iproute2"))
}

/// The shared libraries that these need, as they look for them.
fn libraries<'a>(programs: impl Iterator<Item = &'a Path>) -> Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    for program in programs {
        let list = run("ldd", &[&program.to_string_lossy()])?;
        // "libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x...)", and the loader's path alone.
        let paths = list.lines().filter_map(|line| line.split_whitespace().find(is_path));
        found.extend(paths.map(PathBuf::from));
    }
    Ok(found)
}

fn is_path(word: &&str) -> bool {
    word.starts_with('/')
}

/// The module files, which must exist, below `base`'s only kernel version.
fn module_files(base: &Path, names: &[&str]) -> Result<Vec<PathBuf>> {
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

/// Programs and libraries that are built for guests.
#[derive(Clone, Copy)]
enum Artifact {
    /// A program that is one static file: an initramfs has no libraries.
    Program(&'static str),
    /// One that a library can be put under.
    Dynamic(&'static str),
    /// The package's shared library.
    Library(&'static str),
}

/// Builds something for guests. The profile is the lab's own, and so are the dependencies; only the
/// last link differs, and has a target directory of its own. When nothing changed this takes no
/// time.
fn built(package: &str, artifact: Artifact) -> Result<PathBuf> {
    let target_dir = cache_dir().join("guest");
    let (what, name, flags) = match artifact {
        Artifact::Program(name) => (&["--bin", name][..], name, &STATIC[..]),
        Artifact::Dynamic(name) => (&["--bin", name][..], name, &STATIC[2..]),
        // Without flags: programs of its package that are built besides would build it once more
        // without them, and so each time.
        Artifact::Library(name) => (&["--lib"][..], name, &[][..]),
    };
    let profile = if cfg!(debug_assertions) { "sim" } else { "release" };
    let shared = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    let shared = source_root().join(shared.unwrap_or_else(|| "target".into()));
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let mut build = Command::new(&cargo);
    build
        .args(["rustc", "--quiet", "--locked", "--profile", profile, "--package", package])
        .args(what)
        .arg("--target-dir")
        .arg(&target_dir)
        .arg("--")
        .args(flags)
        .env("CARGO_BUILD_BUILD_DIR", shared)
        .current_dir(source_root());
    let out = build.output().with_context(|| format!("{cargo} is not installed?"))?;
    let error = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success(), "building {name}: {}", error.trim());
    Ok(target_dir.join(profile).join(name))
}

fn pack_initramfs(agent: &[u8], tool: &[u8], modules: &[PathBuf]) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    archive.directory("dev");
    archive.character_device("dev/console", 5, 1);
    archive.directory("modules");
    for (order, path) in modules.iter().enumerate() {
        add_module(&mut archive, order, path)?;
    }
    archive.directory("bin");
    archive.file(&GUEST_TOOL[1..], tool);
    archive.file("init", agent);
    Ok(archive.finish())
}

/// Modules are loaded in the order of their names there.
fn add_module(archive: &mut Archive, order: usize, path: &Path) -> Result<()> {
    let name = path.file_name().context("a module has a name")?.to_string_lossy();
    archive.file(&format!("modules/{order:02}-{name}"), &read(path)?);
    Ok(())
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
