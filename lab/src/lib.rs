//! Boots real guests, makes them compete for a core, and measures.
//!
//! The lab is a set of parts that the demo puts together and that integration tests reuse:
//!
//! | part | concern |
//! |---|---|
//! | [`rundir`] | one run's sockets and its undo journal; the changes of a killed run are undone |
//! | [`process`] | children that die with the lab, whatever happens to it |
//! | [`link`] | the delay line between the remote host and this one |
//! | [`host`] | a private network namespace with bridge and taps; the remote host's namespace |
//! | [`image`] | guest kernel, guest binary, initramfs |
//! | [`packages`] | Debian's programs for guests |
//! | [`accel`] | whether KVM really works here |
//! | [`vmm`] | a guest under QEMU or user-mode Linux, and its vCPU threads |
//! | [`guest`] | the host's end of a guest's control channel |
//! | [`daemon`] | nightporterd with one port per guest |
//! | [`passt`] | passt, as another back-end of a guest |
//! | [`captures`] | both sides of a guest's connections, and the trace checker's findings |
//! | [`cpus`], [`sched`] | the use of cores; how the guests compete for theirs |
//! | [`world`] | all of the above put together |
//! | [`hosts`] | two hosts, each with a daemon, and guests of both |
//! | [`transfer`], [`download`] | one timed and verified upload; the same the other way |
//! | [`flood`] | a guest that floods, by its tool |
//! | [`peer`] | ends of connections in guests, over TCP or over their host |
//! | [`scenario`] | the tests on real guests |
//! | [`experiment`], [`progress`] | how arms are compared: rounds, samples, table, verdicts |
//! | [`demo`] | the comparison of paths |
//! | [`demo_toe`] | sockets over the host compared with guest TCP |
//! | [`hpcc`] | the HPC Challenge of processes in guests, by overlay and by TOE |
//! | [`compare`] | congestion offload compared with Linux's own CUBIC, over one bottleneck |
//! | [`boosted`] | boosted VMs, their neighbours and the daemon's worker on one core |
//! | [`crowd`] | the cost of many VMs that do not run |
//! | [`always_on`] | guests that send without end: the ACKs that host and guest see |
//! | [`delays`] | where segments wait: in the host, and for the guest |
//! | [`together`] | several uploads at once to one guest |
//! | [`outside`] | the same uploads by curl |
//!
//! Nothing is named in the host's own network namespace, so there is nothing to clean up there:
//! bridge, taps and the remote host disappear with the processes that hold them.

pub mod accel;
pub mod always_on;
mod boost;
pub mod boosted;
pub mod captures;
pub mod compare;
pub mod cpus;
pub mod crowd;
pub mod daemon;
pub mod delays;
pub mod demo;
pub mod demo_toe;
pub mod download;
pub mod experiment;
pub mod figures;
pub mod flood;
pub mod guest;
pub mod host;
pub mod hosts;
pub mod hpcc;
pub mod image;
pub mod link;
pub mod outside;
pub mod packages;
pub mod passt;
pub mod peer;
pub mod placement;
pub mod process;
pub mod progress;
pub mod rundir;
pub mod scenario;
pub mod sched;
pub mod together;
pub mod transfer;
pub mod vmm;
pub mod world;

mod cpio;
mod flows;
mod front_end;
mod sys;
#[allow(dead_code)] // shared with the tests of the daemon, which use more of it
#[path = "../../daemon/tests/daemon/systemd.rs"]
mod systemd;
