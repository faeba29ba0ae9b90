//! A guest under QEMU or user-mode Linux.

use std::fs;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nightporter_guest::bootline::{Bootline, Neighbour, Nic};
use nightporter_guest::control::{self, Reply};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::accel::Accel;
use crate::guest::Control;
use crate::image::Image;
use crate::process::{CpuUse, Process, tail};

/// How long a VMM may take to connect its serial port.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// How a NIC is attached to the host.
#[derive(Debug, Clone)]
pub enum Attach {
    /// The VMM opens this tap.
    Tap(String),
    /// The VMM is vhost-user front-end on this socket; the back-end listens.
    VhostUser(PathBuf),
}

/// The guest to boot.
#[derive(Debug, Clone)]
pub struct Spec {
    /// Short name, unique in the run; also the stem of its log files.
    pub name: String,
    /// The VMM.
    pub vmm: Vmm,
    /// Guest memory, MiB.
    pub memory_mib: u32,
    /// NICs in order.
    pub nics: Vec<(Nic, Attach)>,
    /// Hosts it shall know without ARP.
    pub neighbours: Vec<Neighbour>,
    /// The back-end's socket for its socket device, if it has one.
    pub toe: Option<PathBuf>,
    /// Buffers in the receive rings of QEMU's NICs; `None`: QEMU's 256.
    pub rx_ring: Option<u16>,
    /// Of QEMU: it can be moved to another VMM.
    pub moves: Option<Move>,
}

/// How a guest is moved.
#[derive(Debug, Clone)]
pub struct Move {
    /// QEMU takes orders there.
    pub qmp: PathBuf,
    /// It boots no guest, but waits for orders: where to take one from, and to let it run.
    pub waits: bool,
}

/// The VMMs the lab knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vmm {
    /// QEMU with this accelerator.
    Qemu(Accel),
    /// User-mode Linux.
    Uml,
}

/// Where a guest's files go.
#[derive(Debug, Clone, Copy)]
pub struct Places<'a> {
    /// Sockets: short-lived.
    pub sockets: &'a Path,
    /// Console and VMM output: kept.
    pub logs: &'a Path,
}

/// A running guest. Dropping it kills it.
#[derive(Debug)]
pub struct Guest {
    name: String,
    vmm: Vmm,
    process: Process,
    control: Control,
    console: PathBuf,
}

impl Guest {
    /// Starts the VMM; [`Guest::wait_ready`] tells when the guest is up.
    ///
    /// # Errors
    /// The VMM is not installed or ends at once.
    pub fn start(spec: &Spec, image: &Image, places: Places<'_>) -> Result<Self> {
        let log = places.logs.join(format!("{}-vmm.log", spec.name));
        let (process, stream, console) = match spec.vmm {
            Vmm::Qemu(accel) => start_qemu(spec, accel, image, places, &log)?,
            Vmm::Uml => start_uml(spec, image, places, log)?,
        };
        let control = Control::new(stream)?;
        Ok(Self { name: spec.name.clone(), vmm: spec.vmm, process, control, console })
    }

    /// Waits until the guest's agent has its NICs up and listens. Also after a reboot.
    ///
    /// # Errors
    /// It did not come up; the message holds the end of its console.
    pub fn wait_ready(&mut self, limit: Duration) -> Result<()> {
        let result = self.control.wait_ready(&mut self.process, limit);
        result.with_context(|| format!("{}; console:\n  {}", self.name, tail(&self.console)))
    }

    /// Sends a command to the guest's agent and waits for the reply.
    ///
    /// # Errors
    /// The agent refused, or the guest is gone.
    pub fn call(&mut self, command: &control::Command) -> Result<Reply> {
        let result = self.control.call(&mut self.process, command);
        result.with_context(|| self.name.clone())
    }

    /// Sends a command on which the guest leaves, or whose reply is waited for later.
    ///
    /// # Errors
    /// The guest is gone already.
    pub fn send(&mut self, command: &control::Command) -> Result<()> {
        self.control.send(command)
    }

    /// Waits for the reply to a command that was sent.
    ///
    /// # Errors
    /// Those of [`Self::call`].
    pub fn hear(&mut self) -> Result<Reply> {
        self.control.hear(&mut self.process).with_context(|| self.name.clone())
    }

    /// Sends the VMM a signal: SIGSTOP takes the guest off its CPU for good.
    ///
    /// # Errors
    /// It has ended.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(Pid::from_raw(self.pid()), signal).with_context(|| self.name.clone())
    }

    /// Its VMM.
    #[must_use]
    pub const fn vmm(&self) -> Vmm {
        self.vmm
    }

    /// Process id of the VMM.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Ids of the threads that run the guest's code.
    ///
    /// # Errors
    /// The VMM has no vCPU thread.
    pub fn vcpu_threads(&self) -> Result<Vec<i32>> {
        let tasks = format!("/proc/{0}/task", self.pid());
        let mut threads = Vec::new();
        match self.vmm {
            Vmm::Qemu(_) => {
                for entry in fs::read_dir(tasks)? {
                    // QEMU names its threads with debug-threads=on: "CPU 0/TCG", "CPU 0/KVM".
                    let path = entry?.path();
                    let comm = fs::read_to_string(path.join("comm")).unwrap_or_default();
                    if comm.starts_with("CPU ") {
                        let id = path.file_name().context("a task has a name")?;
                        threads.push(id.to_string_lossy().parse()?);
                    }
                }
            }
            Vmm::Uml => {
                // The kernel is one thread; each address space of the guest is a child of it.
                threads.push(self.pid());
                let children = fs::read_to_string(format!("{tasks}/{}/children", self.pid()))?;
                for child in children.split_whitespace() {
                    threads.push(child.parse()?);
                }
            }
        }
        ensure!(!threads.is_empty(), "{} has no vCPU thread", self.name);
        Ok(threads)
    }

    /// The time of its vCPU threads, and of all other threads of its VMM, on their cores so far.
    ///
    /// # Errors
    /// The guest is gone.
    pub fn cpu_use(&self) -> Result<(CpuUse, CpuUse)> {
        let threads = self.vcpu_threads()?;
        let mut vcpu = CpuUse::default();
        for &thread in &threads {
            let one = CpuUse::of_thread(thread)?;
            vcpu.time += one.time;
            vcpu.switches += one.switches;
        }
        Ok((vcpu, CpuUse::of_process(self.pid(), &threads)?))
    }

    /// Waits for the reply to a command that was sent, for so long.
    ///
    /// # Errors
    /// Those of [`Self::call`].
    pub fn hear_within(&mut self, limit: Duration) -> Result<Reply> {
        let heard = self.control.hear_within(&mut self.process, limit);
        heard.with_context(|| self.name.clone())
    }

    /// Kills the VMM at once, as a crash would.
    pub fn kill(mut self) {
        self.die();
    }

    /// The same of one that is kept.
    pub fn die(&mut self) {
        self.process.kill();
    }
}

/// The VMM, the host's end of the control channel, and where the console goes.
type Started = (Process, UnixStream, PathBuf);

fn start_qemu(
    spec: &Spec,
    accel: Accel,
    image: &Image,
    places: Places<'_>,
    log: &Path,
) -> Result<Started> {
    let socket = places.sockets.join(format!("{}-control.sock", spec.name));
    let listener = UnixListener::bind(&socket)
        .with_context(|| format!("listening on {}", socket.display()))?;
    let console = places.logs.join(format!("{}-console.log", spec.name));
    let command = qemu(spec, accel, image, &socket, &console);
    let mut process = Process::spawn(&spec.name, command, log)?;
    let stream = accept(&listener, &mut process)?;
    Ok((process, stream, console))
}

fn start_uml(spec: &Spec, image: &Image, places: Places<'_>, log: PathBuf) -> Result<Started> {
    let (ours, theirs) = UnixStream::pair()?;
    let mut command = uml(spec, image, places);
    command.stdin(Stdio::from(OwnedFd::from(theirs)));
    let process = Process::spawn(&spec.name, command, &log)?;
    Ok((process, ours, log)) // the console is its standard output
}

fn accept(listener: &UnixListener, process: &mut Process) -> Result<UnixStream> {
    listener.set_nonblocking(true)?;
    let deadline = Instant::now() + CONNECT_LIMIT;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                process.check_alive()?;
                ensure!(Instant::now() < deadline, "the VMM did not connect its serial port");
                thread::sleep(Duration::from_millis(5)); // polls two conditions: socket, child
            }
            Err(e) => return Err(e).context("accepting the VMM's serial port"),
        }
    }
}

fn bootline(spec: &Spec, control: &str) -> Bootline {
    Bootline {
        control: control.to_owned(),
        nics: spec.nics.iter().map(|(nic, _)| nic.clone()).collect(),
        neighbours: spec.neighbours.clone(),
    }
}

fn qemu(spec: &Spec, accel: Accel, image: &Image, socket: &Path, console: &Path) -> Command {
    let name = &spec.name;
    let memory = spec.memory_mib;
    let mut command = Command::new("qemu-system-x86_64");
    let mut add = |option: &str, value: &str| {
        command.args([option, value]);
    };
    add("-name", &format!("{name},debug-threads=on"));
    for option in accel.qemu_options() {
        add(option.0, option.1);
    }
    add("-machine", "q35,memory-backend=m0");
    add("-object", &format!("memory-backend-memfd,id=m0,size={memory}M,share=on"));
    add("-m", &format!("{memory}M"));
    add("-smp", "1");
    add("-display", "none");
    add("-kernel", &image.kernel.to_string_lossy());
    add("-initrd", &image.initramfs.to_string_lossy());
    let bootline = bootline(spec, "ttyS1");
    add("-append", &format!("console=ttyS0 loglevel=5 panic=1 rdinit=/init {bootline}"));
    add("-chardev", &format!("file,id=console,path={}", console.display()));
    add("-serial", "chardev:console");
    add("-chardev", &format!("socket,id=control,path={}", socket.display()));
    add("-serial", "chardev:control");
    if let Some(moves) = &spec.moves {
        add("-qmp", &format!("unix:{},server=on,wait=off", moves.qmp.display()));
        if moves.waits {
            add("-incoming", "defer");
        }
    }
    for (index, (nic, attach)) in spec.nics.iter().enumerate() {
        let netdev = match attach {
            Attach::Tap(tap) => {
                let vhost = if accel.has_vhost_net() { "on" } else { "off" };
                format!("tap,id=n{index},ifname={tap},script=no,downscript=no,vhost={vhost}")
            }
            Attach::VhostUser(socket) => {
                let path = socket.display();
                add("-chardev", &format!("socket,id=c{index},path={path},reconnect=1"));
                format!("vhost-user,id=n{index},chardev=c{index}")
            }
        };
        add("-netdev", &netdev);
        // QEMU 7.2 under TCG crashes with vhost-user on the MSI-X path; INTx (vectors=0) works.
        // Both NICs of a guest get the same, so that the paths differ in the back-end only.
        let vectors = if accel == Accel::Tcg { ",vectors=0" } else { "" };
        let ring = spec.rx_ring.map_or_else(String::new, |n| format!(",rx_queue_size={n}"));
        let mac = nic.mac;
        add(
            "-device",
            &format!("virtio-net-pci,netdev=n{index},mac={mac},romfile={ring}{vectors}"),
        );
    }
    if let Some(socket) = &spec.toe {
        add("-chardev", &format!("socket,id=toe,path={}", socket.display()));
        let vectors = if accel == Accel::Tcg { ",vectors=0" } else { "" };
        add("-device", &format!("vhost-user-vsock-pci,chardev=toe{vectors}"));
    }
    if spec.moves.as_ref().is_some_and(|moves| moves.waits) {
        command.arg("-S");
    }
    command.args(["-nodefaults", "-no-user-config"]).stdin(Stdio::null());
    command
}

/// User-mode Linux: standard input is the control channel, standard output the console.
fn uml(spec: &Spec, image: &Image, places: Places<'_>) -> Command {
    let mut command = Command::new(&image.kernel);
    command
        .arg(format!("umid={}", spec.name))
        .arg(format!("uml_dir={}", places.sockets.display()))
        .arg(format!("mem={}M", spec.memory_mib))
        .arg(format!("initrd={}", image.initramfs.display()))
        .args(["con=null", "con0=null,fd:1", "ssl0=fd:0", "loglevel=5", "panic=1"]);
    for (index, (nic, attach)) in spec.nics.iter().enumerate() {
        command.arg(match attach {
            Attach::Tap(tap) => {
                format!("vec{index}:transport=tap,ifname={tap},gro=1,mac={}", nic.mac)
            }
            // Virtio device 1 is the network card. Its address is the back-end's to tell.
            Attach::VhostUser(socket) => format!("virtio_uml.device={}:1", socket.display()),
        });
    }
    if let Some(socket) = &spec.toe {
        // Virtio device 19 is the socket device.
        command.arg(format!("virtio_uml.device={}:19", socket.display()));
    }
    command.args(bootline(spec, "ttyS0").to_string().split(' '));
    if let Some(library) = &image.preload {
        command.env("LD_PRELOAD", library);
    }
    // The signal frames of UML 6.1 have no room for the registers of AVX-512, so a handler that
    // uses memcpy() would change those of the program that it interrupts. glibc leaves AVX-512
    // alone if its environment says so, which the guest's init has from this line.
    command.arg("GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX512F,-AVX512VL");
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(page: &str) -> String {
        fs::read_to_string(crate::image::source_root().join(page)).unwrap()
    }

    /// The page's lines of code that contain `word`.
    fn lines_of(page: &str, word: &str) -> String {
        let text = read(page);
        let found: Vec<_> = text.split("```").filter(|block| block.contains(word)).collect();
        assert_eq!(found.len(), 1, "{word} in blocks of {page}");
        found[0].to_owned()
    }

    fn web1(vmm: Vmm) -> Spec {
        let (mac, address) = ("52:54:00:12:34:56".parse().unwrap(), [10, 0, 0, 1].into());
        let attach = Attach::VhostUser("/run/nightporter/web1.sock".into());
        Spec {
            name: "web1".into(),
            vmm,
            memory_mib: 1024,
            nics: vec![(Nic { mac, address, prefix: 24 }, attach)],
            neighbours: vec![],
            toe: None,
            rx_ring: None,
            moves: None,
        }
    }

    fn words(command: &Command) -> Vec<String> {
        command.get_args().map(|word| word.to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn guests_of_qemu_are_attached_as_readme_has_it() {
        let (image, nowhere) = (Image::without_files(), Path::new("/nowhere"));
        let spec = web1(Vmm::Qemu(Accel::Tcg));
        let booted = words(&qemu(&spec, Accel::Tcg, &image, nowhere, nowhere));
        let text = lines_of("README.md", "vhost-user,id=");
        let shown: Vec<_> = text.split_whitespace().collect();
        assert_eq!(shown.len(), 12, "{text}");
        for option in shown.chunks(2) {
            let value = option[1].replace("size=1G", "size=1024M");
            // The lab's devices have no boot ROM, and under TCG no MSI-X.
            let is_so = |pair: &[String]| {
                let rest = pair[1].strip_prefix(&value);
                pair[0] == option[0]
                    && rest.is_some_and(|it| matches!(it, "" | ",romfile=,vectors=0"))
            };
            assert!(booted.windows(2).any(is_so), "{option:?} in {booted:?}");
        }
    }

    #[test]
    fn guests_of_user_mode_linux_are_attached_as_the_docs_have_it() {
        let nowhere = Path::new("/nowhere");
        let places = Places { sockets: nowhere, logs: nowhere };
        let booted = words(&uml(&web1(Vmm::Uml), &Image::without_files(), places));
        let page = read("docs/attach.md");
        for word in [
            "virtio_uml.device=/run/nightporter/web1.sock:1",
            "GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX512F,-AVX512VL",
        ] {
            assert!(
                page.contains(word) && booted.iter().any(|it| it == word),
                "{word}: {booted:?}"
            );
        }
    }
}
