use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use nightporter_boost::process::Turns;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::find::{Kind, Vmm, Why, hides, vmm};
use super::report::{Gain, Report, VcpuReport, VmReport, show};
use super::*;

/// The VMM that [`a_vmm`] plays, as its threads' names: those with an `x` hog a core, others sleep.
const THREADS: &str = "NIGHTPORTER_TEST_VMM";

/// Not a test of its own: the process that [`Playing::begin`] starts.
#[test]
fn a_vmm() {
    let Ok(names) = std::env::var(THREADS) else { return };
    let allowed = sched_getaffinity(None).unwrap();
    let mut one = CpuSet::new();
    one.set((0..CpuSet::MAX_CPU).find(|&cpu| allowed.is_set(cpu)).unwrap());
    sched_setaffinity(None, &one).unwrap();
    let (begun, begins) = mpsc::channel();
    for name in names.split(',').map(String::from) {
        let begun = begun.clone();
        let hogs = name.contains('x');
        let run = move || {
            begun.send(()).unwrap();
            loop {
                if hogs {
                    std::hint::spin_loop();
                } else {
                    thread::park();
                }
            }
        };
        thread::Builder::new().name(name).spawn(run).unwrap();
        begins.recv().unwrap();
    }
    println!("\nplays");
    loop {
        thread::park();
    }
}

/// A process with the name, the command line and the threads of a VMM.
struct Playing(Child);

impl Playing {
    fn begin(program: &str, threads: &str, arguments: &[&str]) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .arg0(program)
            .args(["--exact", "--nocapture", "advise::tests::a_vmm", "--"])
            .args(arguments)
            .env(THREADS, threads)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut playing = Self(child);
        let lines = BufReader::new(playing.0.stdout.take().unwrap()).lines();
        assert!(lines.map_while(Result::ok).any(|line| line == "plays"));
        playing
    }

    fn pid(&self) -> i32 {
        self.0.id().cast_signed()
    }
}

impl Drop for Playing {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Only those that this test plays: others run beside.
fn found(playing: &[&Playing]) -> Found {
    let mut found = find::all();
    found.vmms.retain(|vmm| playing.iter().any(|it| it.pid() == vmm.pid));
    found
}

fn text(report: &Report) -> String {
    let mut out = Vec::new();
    show(&mut out, report).unwrap();
    String::from_utf8(out).unwrap()
}

/// Looks until every VM that hogs has had turns after waits: the machine may be busy.
fn survey(playing: &[&Playing], until: impl Fn(&Survey) -> bool) -> Report {
    let (mut survey, begun) = (Survey::begin(found(playing)), Instant::now());
    while !until(&survey) {
        assert!(begun.elapsed() < Duration::from_secs(60), "{survey:?}");
        thread::yield_now();
        survey.look();
    }
    survey.end(begun.elapsed())
}

#[test]
fn vcpus_that_share_a_core_wait_and_one_that_sleeps_does_not() {
    let busy = Playing::begin(
        "/usr/bin/qemu-system-x86_64",
        "CPU 0x/KVM,CPU 1x/KVM,CPU 2x/KVM,worker",
        &["-name", "guest=busy,debug-threads=on"],
    );
    let idle = Playing::begin("qemu-system-x86_64", "CPU 0/TCG", &["-name", "idle"]);
    let report = survey(&[&busy, &idle], |survey| {
        let turns = |vcpu: &Vcpu| vcpu.sums.count >= 20 && vcpu.sums.waited_ns > 0;
        survey.vms.iter().any(|vm| vm.vcpus.len() == 3 && vm.vcpus.iter().all(turns))
    });
    let [busy, idle] = &report.vms[..] else { panic!("{report:?}") };
    assert_eq!(busy.vcpus.len(), 3, "the worker is none: {busy:?}");
    assert_eq!((busy.gain, idle.gain), (Some(Gain::Gains), Some(Gain::Idle)), "{report:?}");
    let sum = |of: fn(&VcpuReport) -> f64| busy.vcpus.iter().map(of).sum::<f64>();
    // Three that always want one core have no more than the core, and wait otherwise.
    assert!(sum(|vcpu| vcpu.ran_share) <= 1.1, "{report:?}");
    assert!(sum(|vcpu| vcpu.waited_share) >= 1.0, "{report:?}");
    let worst = busy.worst().unwrap();
    assert!(worst.late_ms > 0.0 && worst.late_ms < worst.typical_wait_ms, "{report:?}");
    assert!(text(&report).contains("\nbusy (QEMU, pid "), "{}", text(&report));
}

#[test]
fn a_vm_that_ends_meanwhile_is_named() {
    let vm = Playing::begin("qemu-system-x86_64", "CPU 0x/TCG", &["-name", "brief"]);
    let pid = vm.pid();
    let mut survey = Survey::begin(found(&[&vm]));
    drop(vm);
    survey.look();
    survey.search();
    let report = survey.end(Duration::from_secs(1));
    assert_eq!(report.vms[0].gain, None);
    assert!(text(&report).contains(&format!("brief (QEMU, pid {pid}): has ended meanwhile\n")));
    // And if it ends between the search for processes and the first look, nothing is said.
    let gone = Vmm { kind: Kind::Qemu, pid, name: None };
    assert!(Survey::begin(Found { vmms: vec![gone], hidden: false }).vms.is_empty());
}

#[test]
fn qemu_without_names_of_threads_is_told_what_to_set() {
    let vm = Playing::begin("qemu-system-x86_64", "qemu-system-x86", &["-name", "web1"]);
    let report = Survey::begin(found(&[&vm])).end(Duration::from_secs(1));
    let text = text(&report);
    assert!(text.contains("its vCPUs' threads have no names\n"), "{text}");
    assert!(text.contains("  nothing is known: start it with -name NAME,debug-threads=on\n"));
    // Another program with such a name is no VM.
    let other = Playing::begin("/srv/linux", "worker", &[]);
    assert!(Survey::begin(found(&[&other])).vms.is_empty());
}

#[test]
fn vms_are_told_by_their_programs_and_named_by_their_command_lines() {
    let of = |comm: &str, line: &str| {
        let found = vmm(7, comm.as_bytes(), line.replace(' ', "\0").as_bytes());
        found.map(|it| (it.kind, it.name))
    };
    let named = |kind, name: &str| Some((kind, Some(name.to_owned())));
    let qemu = "/usr/bin/qemu-system-x86_64";
    assert_eq!(of("x\n", &format!("{qemu} -name web1")), named(Kind::Qemu, "web1"));
    assert_eq!(of("x\n", &format!("{qemu} -name web1,process=a")), named(Kind::Qemu, "web1"));
    assert_eq!(
        of("x\n", &format!("{qemu} -name debug-threads=on,guest=web1")),
        named(Kind::Qemu, "web1")
    );
    assert_eq!(of("qemu-system-x86\n", "renamed -name"), Some((Kind::Qemu, None)));
    assert_eq!(of("kvm\n", ""), Some((Kind::Qemu, None)));
    assert_eq!(of("linux\n", "./linux umid=u1 mem=64M"), named(Kind::UserModeLinux, "u1"));
    assert_eq!(of("cloud-hyperviso\n", "ch --cpus 2"), Some((Kind::CloudHypervisor, None)));
    assert_eq!(of("firecracker\n", "x/firecracker --id f1"), named(Kind::Firecracker, "f1"));
    assert_eq!(of("crosvm\n", "crosvm run --name c1"), named(Kind::Crosvm, "c1"));
    assert_eq!(of("qemu-img\n", "qemu-img convert"), None);
    assert_eq!(of("x\n", &format!("{qemu} -name \x1b[2J")), named(Kind::Qemu, "?[2J"));
}

#[test]
fn a_proc_that_hides_processes_is_noticed() {
    let line = |options: &str| {
        format!(
            "21 1 0:19 / /sys rw - sysfs sysfs rw\n24 1 0:22 / /proc rw - proc proc {options}\n"
        )
    };
    assert!(
        !hides(&line("rw")) && !hides(&line("rw,hidepid=0")) && !hides(&line("rw,hidepid=off"))
    );
    assert!(hides(&line("rw,hidepid=2")) && hides(&line("rw,gid=7,hidepid=invisible")));
    assert!(
        !hides("24 1 0:22 / /tmp/proc rw - proc proc rw,hidepid=2"),
        "not the one that is used"
    );
    let report = Report { seconds: 5.0, hidden: true, vms: vec![] };
    assert!(text(&report).ends_with(" run as root to see all VMs\n"));
}

#[test]
fn times_are_read_and_a_kernel_that_does_not_count_is_refused() {
    let all = ["5s", "5", "500ms", "2min", "1440min"].map(|text| span(text).unwrap().as_millis());
    assert_eq!(all, [5_000, 5_000, 500, 120_000, 86_400_000]);
    for wrong in ["", "s", "0s", "-1s", "1.5s", "5 s", "2h", "1441min", "99999999999999999999s"] {
        assert!(span(wrong).is_err(), "{wrong}");
    }
    assert!(check_kernel("1000 0 1\n").is_ok());
    assert!(check_kernel("0 0 0\n").is_err() && check_kernel("").is_err());
}

#[test]
fn the_sums_are_those_of_the_turns() {
    // Two waits of 30 ms in 100 ms: a frame that comes at any moment waits 2 * 30² / 2 / 100 ms.
    let mut vcpu = Vcpu::default();
    let ms = 1_000_000;
    let first = Turns { ran_ns: 5 * ms, waited_ns: 7 * ms, count: 9 };
    let then = Turns { ran_ns: 25 * ms, waited_ns: 37 * ms, count: 10 };
    vcpu.add(first, then);
    vcpu.add(then, Turns { ran_ns: 45 * ms, waited_ns: 67 * ms, count: 11 });
    let of = vcpu.report(Duration::from_millis(100));
    assert_eq!((of.ran_share, of.waited_share, of.turns_per_s), (0.4, 0.6, 20.0));
    assert_eq!((of.mean_wait_ms, of.typical_wait_ms, of.late_ms), (30.0, 30.0, 9.0));
}

#[test]
fn each_vm_has_two_lines_of_80_columns_that_say_what_it_gains() {
    let vmm = |name: Option<&str>| Vmm {
        kind: Kind::CloudHypervisor,
        pid: 4_194_304,
        name: name.map(Into::into),
    };
    let of = |ran_share, waited_share, wait_ms: f64| {
        let vcpu = VcpuReport {
            ran_share,
            waited_share,
            turns_per_s: 123_456.0,
            mean_wait_ms: wait_ms,
            typical_wait_ms: wait_ms,
            late_ms: waited_share * wait_ms / 2.0,
            ..VcpuReport::default()
        };
        let slept = VcpuReport::default();
        VmReport::new(vmm(Some("a-very-long-name-of-a-virtual-machine")), vec![vcpu, slept], None)
    };
    let mut vms = vec![
        of(0.001, 0.001, 30.0),
        of(0.9, 0.001, 30.0),
        of(0.4, 0.5, 0.05),
        of(0.33, 0.66, 60.0),
        of(0.0, 1.0, 5_000.0),
    ];
    vms.extend(
        [Why::Names, Why::Rights, Why::Ended]
            .map(|why| VmReport::new(vmm(None), Vec::new(), Some(why))),
    );
    let text = text(&Report { seconds: 5.0, hidden: false, vms });
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    let gains: Vec<_> = text.lines().skip(1).skip(1).step_by(2).collect();
    assert_eq!(
        gains,
        [
            "  is idle: look again while it has work and traffic",
            "  gains nothing: it hardly ever waits for a core",
            "  gains little: its waits (0.05 ms) are shorter than a round trip",
            "  its ACKs are 20 ms late; acked up to 21x sooner at 1 ms, 3.0x at 10 ms",
            "  its ACKs are 2500 ms late; acked up to 2501x sooner at 1 ms, 251x at 10 ms",
            "  nothing is known: start it with -name NAME,debug-threads=on",
            "  nothing is known: run as root",
            "  nothing is known",
        ]
    );
}
