// Package wire holds what travels between a server and a host program: the JSON
// shapes of the host API and the binary frames of a process log. It is pure.
//
// The host API is HTTP/1.1 over whatever byte stream the target has. Every
// request carries [GenerationHeader]; a host refuses a generation lower than the
// highest it has seen (P7). Errors are api.Problem bodies.
//
//	GET    /v1/info                           HostInfo
//	PUT    /v1/lease                          Lease -> 204
//	PUT    /v1/boxes/{box}                    BoxSpec -> BoxInfo      (idempotent)
//	GET    /v1/boxes                          []BoxInfo
//	GET    /v1/boxes/{box}                    BoxInfo
//	DELETE /v1/boxes/{box}                    204; conflict while a process lives in it
//	PUT    /v1/boxes/{box}/files?path=        tar in -> 204
//	GET    /v1/boxes/{box}/files?path=        tar out
//	PUT    /v1/images?name=                   OCI layout tar or docker-save tar -> []ImageInfo
//	GET    /v1/images                         []ImageInfo
//	DELETE /v1/images/{digest}                204; conflict while a box uses it
//	PUT    /v1/procs/{proc}                   ProcSpec -> ProcState   (idempotent; P1)
//	GET    /v1/procs                          []ProcState
//	GET    /v1/procs/{proc}                   ProcState
//	GET    /v1/watch                          NDJSON of ProcState: every process once, then each change of Rev
//	GET    /v1/procs/{proc}/log?cursor=&max_bytes=&wait_ms=&follow=   frames, ending in a KindStatus frame
//	POST   /v1/procs/{proc}/ack?cursor=       204: every byte before cursor may be dropped at the cap
//	PUT    /v1/procs/{proc}/stdin?offset=&eof= bytes -> api.StdinState
//	POST   /v1/procs/{proc}/signal            Signal -> 204
//	POST   /v1/procs/{proc}/resize            api.Winsize -> 204
//	POST   /v1/procs/{proc}/close             Close -> ProcState, when the tree is empty or proof was given up;
//	                                          of an unknown id the host records durably that it must never
//	                                          start: ended, proof never_started, no box; a later PUT returns that
//	DELETE /v1/procs/{proc}                   forget an ended process and its log -> 204
//	POST   /v1/shutdown                       204; conflict while a process lives
package wire

import (
	"time"

	"github.com/stockade-run/stockade/internal/api"
)

// Protocol is the version of the host API; a server refuses a host of another.
const Protocol = 1

// GenerationHeader carries the server's generation on every request.
const GenerationHeader = "Stockade-Generation"

// FramesType is the media type of a log in frames.
const FramesType = "application/vnd.stockade.frames"

// HostInfo says who a host program is. HostID is minted once for its directory;
// BootID is /proc/sys/kernel/random/boot_id.
type HostInfo struct {
	HostID   string    `json:"host_id"`
	BootID   string    `json:"boot_id"`
	Protocol int       `json:"protocol"`
	Version  string    `json:"version"`
	Digest   string    `json:"digest,omitempty"` // of the program and arguments it was started with, as its starter gave it
	Runtime  string    `json:"runtime"`          // "runc 1.1.5"
	Started  time.Time `json:"started"`
	Problems []string  `json:"problems,omitempty"` // missing features, by name
}

// Lease bounds how long processes may go on without a server. A shim whose
// lease has expired stops its tree even if the host program is dead.
type Lease struct {
	Millis int64 `json:"ms"`
}

// BoxSpec is what a host makes a box from. It is fixed for the box's life.
type BoxSpec struct {
	ID     string        `json:"id"`
	Image  string        `json:"image,omitempty"` // digest; empty is the host profile
	Limits api.BoxLimits `json:"limits"`          // no zero fields
	Mounts []api.Mount   `json:"mounts,omitempty"`
}

// BoxInfo is a box as the host has it. NetNS is a path on the host that names
// its network namespace, for a server on the same machine.
type BoxInfo struct {
	Spec  BoxSpec `json:"spec"`
	NetNS string  `json:"netns"`
	Procs int     `json:"procs"` // live
}

// ImageInfo is an unpacked image.
type ImageInfo struct {
	Digest  string    `json:"digest"` // "sha256:…" of the manifest
	Names   []string  `json:"names,omitempty"`
	Size    int64     `json:"size"`
	Created time.Time `json:"created"`
}

// ProcSpec is what a host is told to start. The host keeps it durably before it
// starts anything, so that the same id can never start twice.
type ProcSpec struct {
	ID             string       `json:"id"`
	Box            string       `json:"box"`
	Argv           []string     `json:"argv"`
	Cwd            string       `json:"cwd"` // relative to the workspace, cleaned
	Env            []string     `json:"env"` // the whole environment, "K=V", sorted
	Stdin          bool         `json:"stdin"`
	PTY            *api.Winsize `json:"pty,omitempty"`
	DeadlineMillis int64        `json:"deadline_ms"`
	SpoolBytes     int64        `json:"spool_bytes"`
	Overflow       api.Overflow `json:"overflow"`
	MemoryBytes    int64        `json:"memory_bytes,omitempty"` // 0: only the box's limit
	Pids           int64        `json:"pids,omitempty"`         // 0: only the box's limit
}

// Phase is where the keeper of a process is in its life (package process, Keeper).
type Phase string

// The phases. Accepted: recorded, nothing started. Ended: the exit record is durable.
const (
	PhaseAccepted Phase = "accepted"
	PhaseStarting Phase = "starting"
	PhaseRunning  Phase = "running"
	PhaseStopping Phase = "stopping"
	PhaseEnded    Phase = "ended"
)

// ProcState is what a host knows of a process. PIDs never leave the host.
type ProcState struct {
	ID       string         `json:"id"`
	Box      string         `json:"box"`
	Rev      uint64         `json:"rev"` // grows with each change of phase or log end-of-life
	Phase    Phase          `json:"phase"`
	Started  *time.Time     `json:"started,omitempty"`
	Ended    *time.Time     `json:"ended,omitempty"`
	Exit     *api.Exit      `json:"exit,omitempty"`     // set when Phase is ended
	Proof    *Proof         `json:"proof,omitempty"`    // set when the tree is proven empty
	Unproven string         `json:"unproven,omitempty"` // why there is no proof, when ended without one
	Stdin    api.StdinState `json:"stdin"`
	Log      api.LogState   `json:"log"`
}

// Proof is what the kernel said about a tree being gone (P4).
type Proof struct {
	Method    string    `json:"method"` // pid_namespace, cgroup, reboot, never_started
	BootID    string    `json:"boot_id"`
	Container string    `json:"container"`
	Cgroup    string    `json:"cgroup"`
	EmptyAt   time.Time `json:"empty_at"`
}

// Signal asks for a polite signal to the child.
type Signal struct {
	Signal string `json:"signal"`
}

// Close asks for the end of a process.
type Close struct {
	Reason      string `json:"reason"`
	GraceMillis int64  `json:"grace_ms"`
}
