/*
 * Job, cancel and fence of coding-relay-v1: a hub that may die at any moment, a
 * daemon that may not answer, a connection that may break with messages on it, an
 * operator who may verify. Two jobs on one daemon id.
 *
 * What is shown: whatever may be running at the daemon's machine is known to the hub
 * as a live job, or the daemon is fenced; and it has a marker on disk, so a hub that
 * dies leaves a fence. Nothing is sent, and nobody is let in, beside it. The tools of a
 * job are revoked before its cancel is sent and before its end is seen. A cancelled
 * job always ends.
 *
 * Compile with -DBUG=n to plant a fault that must be found:
 *   1 run.start before the marker   2 a late finish lifts the fence
 *   3 no fence at a disconnect      4 tools are revoked after the cancel
 *   5 the marker goes with the first of two jobs
 */
#ifndef BUG
#define BUG 0
#endif
#define JOBS 2

mtype = { start, cancel, finished };
mtype:phase = { unknown, marking, running, cancelling, ended };

chan down = [4] of { mtype, byte }; /* hub to daemon */
chan up = [4] of { mtype, byte };   /* daemon to hub */

bool hub = true;      /* the hub process lives */
bool connected;       /* the hub has a registered connection */
bool fenced;          /* in the hub's memory */
bool marker;          /* on disk */
mtype:phase job[JOBS] = unknown;
bool tools[JOBS];     /* they answer */
bool alive[JOBS];     /* something runs at the daemon's machine */
byte deaths;
byte drops;

#define UNSETTLED(j) (job[j] == marking || job[j] == running || job[j] == cancelling)
#define IDLE (!UNSETTLED(0) && !UNSETTLED(1))
#define KNOWN(j) (job[j] == running || job[j] == cancelling)

inline settle(j) {
	job[j] = ended;
	assert(!tools[j]);
	if
	:: IDLE && !fenced -> marker = false
	:: BUG == 5 && !fenced -> marker = false
	:: else
	fi
}

inline lose() { /* what was on the connection is gone */
	do
	:: nempty(down) -> down?_, _
	:: nempty(up) -> up?_, _
	:: empty(down) && empty(up) -> break
	od
}

/* Each step of the hub is taken under its lock. */
active proctype Hub() {
	byte j;
end:	do
	/* A daemon says hello. */
	:: atomic { hub && !connected && !fenced && IDLE ->
		assert(!alive[0] && !alive[1]);
		connected = true
	   }
	/* A caller asks, the marker is written, run.start is sent. */
	:: atomic { hub && connected && !fenced && job[0] != cancelling && job[1] != cancelling && job[0] == unknown -> job[0] = marking }
	:: atomic { hub && connected && !fenced && job[0] != cancelling && job[1] != cancelling && job[1] == unknown -> job[1] = marking }
	:: atomic { hub && (job[0] == marking || job[1] == marking) && !marker && BUG != 1 -> marker = true }
	:: atomic { hub && job[0] == marking && (marker || BUG == 1) -> j = 0; goto dispatch }
	:: atomic { hub && job[1] == marking && (marker || BUG == 1) -> j = 1; goto dispatch }
	/* The caller leaves, or the time is over. */
	:: atomic { hub && job[0] == running -> j = 0; goto stop }
	:: atomic { hub && job[1] == running -> j = 1; goto stop }
	/* No answer in time. */
	:: atomic { hub && job[0] == cancelling -> fenced = true; job[0] = ended }
	:: atomic { hub && job[1] == cancelling -> fenced = true; job[1] = ended }
	/* run.finished. */
	:: atomic { hub && connected && nempty(up) -> up?finished, j;
		if
		:: KNOWN(j) -> tools[j] = false; settle(j)
		:: !KNOWN(j) && BUG == 2 -> fenced = false
		:: else /* too late: evidence only */
		fi
	   }
	/* The connection breaks. */
	:: atomic { hub && connected && drops < 2 ->
		drops++;
		connected = false;
		lose();
		for (j : 0 .. JOBS-1) {
			tools[j] = false;
			if
			:: KNOWN(j) -> job[j] = ended; if :: BUG != 3 -> fenced = true :: else fi
			:: job[j] == marking -> job[j] = ended
			:: else
			fi
		}
		if :: !fenced -> marker = false :: else fi
	   }
	/* An operator verified that nothing runs. */
	:: atomic { hub && fenced && IDLE && !alive[0] && !alive[1] && empty(down) -> marker = false; fenced = false }
	od;

dispatch:
	atomic {
		if
		:: fenced || job[0] == cancelling || job[1] == cancelling -> settle(j)
		:: else ->
			job[j] = running;
			tools[j] = true;
			down!start, j
		fi;
		goto end
	}
stop:
	atomic {
		job[j] = cancelling;
		if :: BUG != 4 -> tools[j] = false :: else fi;
		assert(!tools[j]);
		down!cancel, j;
		goto end
	}
}

/* kill -9 of the hub, and a new one on the same state directory. */
active proctype Death() {
	byte j;
	do
	:: atomic { hub && deaths < 2 ->
		deaths++;
		hub = false;
		connected = false;
		lose();
		for (j : 0 .. JOBS-1) { tools[j] = false; if :: UNSETTLED(j) -> job[j] = ended :: else fi }
		fenced = marker;
		hub = true
	   }
	:: deaths == 2 -> break
	od
}

/* The machine where the jobs run. It may also be deaf, or slow. */
active proctype Daemon() {
	byte j;
end:	do
	:: atomic { down?start, j -> alive[j] = true }
	:: atomic { down?cancel, j -> /* heard, and maybe not obeyed */
		if
		:: alive[j] -> alive[j] = false; if :: connected -> up!finished, j :: else fi
		:: true
		fi
	   }
	:: atomic { alive[0] && nfull(up) -> alive[0] = false; if :: connected -> up!finished, 0 :: else fi }
	:: atomic { alive[1] && nfull(up) -> alive[1] = false; if :: connected -> up!finished, 1 :: else fi }
	od
}

#define SAFE(j) (!alive[j] || (marker && (fenced || KNOWN(j))))

ltl safe { [] (SAFE(0) && SAFE(1)) }
ltl ends { [] (job[0] == cancelling -> <> (job[0] != cancelling)) }
