// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
/*
 * np_flood: a TCP congestion control for guests of a host that controls congestion (FLOOD-28).
 *
 * It is the kernel's own CUBIC, all of it, with one thing on top: a connection that the host
 * knows from its beginning gets a large window whenever it begins to send with nothing under way,
 * as long as the host's heartbeat is fresh. That is the moment in which the host takes a
 * connection over, and the state in which it sees that it has a copy of everything.
 *
 * What makes it CUBIC again:
 *  - the heartbeat grows stale, or is of another epoch (another daemon, another host): with the
 *    next acknowledgement, or the next data after a pause, the window is what a new connection has;
 *  - it sees a loss. A host that controls congestion hides them, so here is none: the slow start
 *    threshold is that of a new connection, and it never floods again. After a timeout it may;
 *    a host's queue can cause one.
 *
 * Heartbeats are in a map by network namespace and interface, so that loopback, a second NIC, a
 * VLAN and containers never flood. Nobody has to run for it to stop: the map says until when.
 *
 * The structs below name only what is used; libbpf finds the places in the running kernel's BTF
 * (CO-RE). Names are those of Linux 6.1 and 6.18.
 */
#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#define KERNEL __attribute__((preserve_access_index))

/* What a new connection has (RFC 6928; include/net/tcp.h, TCP_INIT_CWND). */
#define INITIAL_WINDOW 10

enum tcp_ca_event {
	CA_EVENT_TX_START,
};

enum tcp_ca_state {
	TCP_CA_Open = 0,
	TCP_CA_Disorder = 1,
	TCP_CA_CWR = 2,
	TCP_CA_Recovery = 3,
	TCP_CA_Loss = 4,
};

struct ns_common {
	unsigned int inum;
} KERNEL;

struct net {
	struct ns_common ns;
} KERNEL;

typedef struct {
	struct net *net;
} possible_net_t;

struct net_device {
	int ifindex;
} KERNEL;

struct dst_entry {
	struct net_device *dev;
} KERNEL;

struct sock_common {
	possible_net_t skc_net;
} KERNEL;

struct sock {
	struct sock_common __sk_common;
	struct dst_entry *sk_dst_cache;
	unsigned long sk_pacing_rate;
	unsigned long sk_max_pacing_rate;
} KERNEL;

/* A struct sock is the beginning of it, but that is not said here. */
struct tcp_sock {
	__u32 snd_cwnd;
	__u32 prior_cwnd;
	__u32 packets_out;
	__u32 data_segs_out;
} KERNEL;

struct ack_sample {
	__u32 pkts_acked;
} KERNEL;

struct tcp_congestion_ops {
	__u32 (*ssthresh)(struct sock *sk);
	void (*cong_avoid)(struct sock *sk, __u32 ack, __u32 acked);
	void (*set_state)(struct sock *sk, __u8 new_state);
	void (*cwnd_event)(struct sock *sk, enum tcp_ca_event ev);
	void (*pkts_acked)(struct sock *sk, const struct ack_sample *sample);
	__u32 (*undo_cwnd)(struct sock *sk);
	__u32 (*min_tso_segs)(struct sock *sk);
	void (*init)(struct sock *sk);
	char name[16];
} KERNEL;

/* net/ipv4/tcp_cubic.c, for struct_ops to call since 5.13. */
extern void cubictcp_init(struct sock *sk) __ksym;
extern __u32 cubictcp_recalc_ssthresh(struct sock *sk) __ksym;
extern void cubictcp_cong_avoid(struct sock *sk, __u32 ack, __u32 acked) __ksym;
extern void cubictcp_state(struct sock *sk, __u8 new_state) __ksym;
extern void cubictcp_cwnd_event(struct sock *sk, enum tcp_ca_event ev) __ksym;
extern void cubictcp_acked(struct sock *sk, const struct ack_sample *sample) __ksym;

/* Where heartbeats are heard. */
struct link {
	__u32 netns; /* the inode of /proc/PID/ns/net */
	__u32 ifindex;
};

/* The last heartbeat there; guest/flood/src/bpf.rs writes it. */
struct beat {
	__u64 until_ns; /* CLOCK_BOOTTIME */
	__u64 epoch;    /* not 0 */
	__u64 segments; /* the window to flood with */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 64);
	__type(key, struct link);
	__type(value, struct beat);
} np_beats SEC(".maps");

/* What is known of a connection. */
struct conn {
	__u64 epoch;  /* in which it began; 0: never to flood */
	__u32 floods; /* its window is ours */
	__u32 seen;   /* a loss was: what it was before is not to come back */
};

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct conn);
} np_conns SEC(".maps");

static __always_inline struct tcp_sock *tcp(struct sock *sk)
{
	return (struct tcp_sock *)sk;
}

/* The fresh heartbeat of the interface that the connection leaves by. */
static __always_inline struct beat *heard(struct sock *sk)
{
	struct dst_entry *dst = sk->sk_dst_cache;
	struct link at = {};
	struct beat *beat;

	if (!dst)
		return NULL;
	at.netns = sk->__sk_common.skc_net.net->ns.inum;
	at.ifindex = dst->dev->ifindex;
	beat = bpf_map_lookup_elem(&np_beats, &at);
	return beat && bpf_ktime_get_boot_ns() < beat->until_ns ? beat : NULL;
}

static __always_inline struct conn *known(struct sock *sk)
{
	return bpf_sk_storage_get(&np_conns, sk, NULL, 0);
}

static __always_inline void steer(struct sock *sk)
{
	struct conn *conn = known(sk);
	struct beat *beat;

	if (!conn || !conn->epoch)
		return;
	beat = heard(sk);
	if (beat && beat->epoch == conn->epoch) {
		if (!tcp(sk)->packets_out && tcp(sk)->snd_cwnd < beat->segments) {
			tcp(sk)->snd_cwnd = beat->segments;
			conn->floods = 1;
		}
	} else if (conn->floods) {
		conn->floods = 0;
		if (tcp(sk)->snd_cwnd > INITIAL_WINDOW)
			tcp(sk)->snd_cwnd = INITIAL_WINDOW;
	}
}

SEC("struct_ops/np_init")
void BPF_PROG(np_init, struct sock *sk)
{
	struct conn *conn;
	struct beat *beat;

	cubictcp_init(sk);
	/* A connection that has sent data may be older than the host. */
	if (tcp(sk)->data_segs_out)
		return;
	beat = heard(sk);
	if (!beat)
		return;
	conn = bpf_sk_storage_get(&np_conns, sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (!conn)
		return;
	conn->epoch = beat->epoch;
	steer(sk); /* now, for the send buffer is sized by it next */
}

/*
 * The kernel asks this before it looks at the window, whenever it is going to send.
 *
 * It cuts segments to what the pacing rate makes of a millisecond, and lets two of them, or as much
 * again, wait below TCP (tcp_tso_autosize(), tcp_small_queue_check()). That rate is the window over
 * the round trip, of which a guest that lost its core in the handshake believes that it takes
 * hundreds of milliseconds: a flood would leave in pieces of 8 KB, and each two would wait for the
 * device. The host paces. So here nothing does but what the application asked for
 * (SO_MAX_PACING_RATE); the next acknowledgement after the flood sets the rate anew.
 */
SEC("struct_ops/np_min_tso_segs")
__u32 BPF_PROG(np_min_tso_segs, struct sock *sk)
{
	struct conn *conn;

	steer(sk);
	conn = known(sk);
	if (conn && conn->floods)
		sk->sk_pacing_rate = sk->sk_max_pacing_rate;
	return 2; /* as net.ipv4.tcp_min_tso_segs */
}

SEC("struct_ops/np_cwnd_event")
void BPF_PROG(np_cwnd_event, struct sock *sk, enum tcp_ca_event ev)
{
	cubictcp_cwnd_event(sk, ev);
}

SEC("struct_ops/np_cong_avoid")
void BPF_PROG(np_cong_avoid, struct sock *sk, __u32 ack, __u32 acked)
{
	steer(sk);
	cubictcp_cong_avoid(sk, ack, acked);
}

SEC("struct_ops/np_ssthresh")
__u32 BPF_PROG(np_ssthresh, struct sock *sk)
{
	__u32 cubic = cubictcp_recalc_ssthresh(sk);
	struct conn *conn = known(sk);

	if (!conn || !conn->floods)
		return cubic;
	conn->floods = 0;
	return cubic < INITIAL_WINDOW ? cubic : INITIAL_WINDOW;
}

SEC("struct_ops/np_set_state")
void BPF_PROG(np_set_state, struct sock *sk, __u8 new_state)
{
	struct conn *conn = known(sk);

	if (conn && (new_state == TCP_CA_Recovery || new_state == TCP_CA_CWR)) {
		conn->seen |= conn->epoch != 0;
		conn->epoch = 0;
	}
	cubictcp_state(sk, new_state);
}

SEC("struct_ops/np_undo_cwnd")
__u32 BPF_PROG(np_undo_cwnd, struct sock *sk)
{
	struct conn *conn = known(sk);
	__u32 now = tcp(sk)->snd_cwnd;
	__u32 before = tcp(sk)->prior_cwnd;

	if (conn && conn->seen)
		return now;
	return before > now ? before : now; /* as tcp_reno_undo_cwnd() */
}

SEC("struct_ops/np_pkts_acked")
void BPF_PROG(np_pkts_acked, struct sock *sk, const struct ack_sample *sample)
{
	cubictcp_acked(sk, sample);
}

SEC(".struct_ops")
struct tcp_congestion_ops np_flood = {
	.init = (void *)np_init,
	.ssthresh = (void *)np_ssthresh,
	.cong_avoid = (void *)np_cong_avoid,
	.set_state = (void *)np_set_state,
	.cwnd_event = (void *)np_cwnd_event,
	.pkts_acked = (void *)np_pkts_acked,
	.min_tso_segs = (void *)np_min_tso_segs,
	.undo_cwnd = (void *)np_undo_cwnd,
	.name = "np_flood",
};

/* Apache-2.0 as the rest, and the GPL for the kernel, which takes no congestion control else. */
char LICENSE[] SEC("license") = "GPL";
