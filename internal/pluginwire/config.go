package pluginwire

import (
	"encoding/json"
	"math"
	"strings"

	"github.com/stockade-run/stockade/internal/jsonscan"
)

// Profile is how plugins are kept apart.
type Profile string

// The profiles.
const (
	ProfileOSS    Profile = "oss_dev" // plain processes, one Workspace
	ProfileShared Profile = "shared"  // boxed workers, many Workspaces
)

// RuntimeIdentity says which instance a Runtime belongs to and which of its Runtimes
// it is.
type RuntimeIdentity struct {
	InstanceUUID string `json:"instance_uuid"`
	RuntimeID    string `json:"runtime_id"`
}

// WorkerPolicy is what every worker may use and how many there may be. All numbers are
// above 0.
type WorkerPolicy struct {
	MaxCPUs                 float64 `json:"max_cpus"`                       // of one worker
	MaxMemoryMB             int     `json:"max_memory_mb"`                  // of one worker, MiB
	MaxPids                 int     `json:"max_pids"`                       // of one worker
	MaxOpenFiles            int     `json:"max_open_files"`                 // of one worker
	MaxFileSizeMB           int     `json:"max_file_size_mb"`               // of one file, MiB
	MaxWorkers              int     `json:"max_workers"`                    // 16
	MaxTotalCPUs            float64 `json:"max_total_cpus"`                 // 8, at least MaxCPUs
	MaxTotalMemoryMB        int     `json:"max_total_memory_mb"`            // 8192, at least MaxMemoryMB
	MaxInstallations        int     `json:"max_installations"`              // 10000, at least MaxWorkers
	MaxPendingRegistrations int     `json:"max_pending_registrations"`      // 1024; not sent, older peers refuse it
	MaxConcurrentRestarts   int     `json:"max_concurrent_restarts"`        // 1
	RestartFailureThreshold int     `json:"restart_failure_threshold"`      // 8, at most MaxInstallations
	RestartFailureWindow    float64 `json:"restart_failure_window_seconds"` // 30 s, at most 3600
	RestartCircuitOpen      float64 `json:"restart_circuit_open_seconds"`   // 60 s, at most 3600
	RequireHardLimits       bool    `json:"require_hard_limits"`            // refuse to work without a control group

	// Since SDK 0.7, for the shared profile only: limits of one worker by mode.
	Dedicated WorkerOverrides `json:"-"`
	Shared    WorkerOverrides `json:"-"`
}

// WorkerOverrides replace the limits of one worker; a zero field keeps the policy's.
type WorkerOverrides struct {
	MaxCPUs       float64 `json:"max_cpus,omitempty"`
	MaxMemoryMB   int     `json:"max_memory_mb,omitempty"`
	MaxPids       int     `json:"max_pids,omitempty"`
	MaxOpenFiles  int     `json:"max_open_files,omitempty"`
	MaxFileSizeMB int     `json:"max_file_size_mb,omitempty"`
}

// For is the policy as it holds for a worker of one mode: in the shared profile the
// overrides of the mode replace the limits of one worker.
func (p WorkerPolicy) For(m Mode, profile Profile) WorkerPolicy {
	if profile != ProfileShared {
		return p
	}
	o := p.Dedicated
	if m == ModeShared {
		o = p.Shared
	}
	if o.MaxCPUs > 0 {
		p.MaxCPUs = o.MaxCPUs
	}
	for _, f := range []struct {
		to   *int
		from int
	}{{&p.MaxMemoryMB, o.MaxMemoryMB}, {&p.MaxPids, o.MaxPids}, {&p.MaxOpenFiles, o.MaxOpenFiles}, {&p.MaxFileSizeMB, o.MaxFileSizeMB}} {
		if f.from > 0 {
			*f.to = f.from
		}
	}
	return p
}

// Capacity is how many workers fit the totals: at least 1.
func (p WorkerPolicy) Capacity() int {
	n := min(float64(p.MaxWorkers), math.Floor(p.MaxTotalCPUs/p.MaxCPUs))
	if p.MaxMemoryMB > 0 {
		n = min(n, float64(p.MaxTotalMemoryMB/p.MaxMemoryMB))
	}
	return int(max(1, n))
}

// RuntimeConfig is what set_runtime_config says. Two are comparable with ==.
type RuntimeConfig struct {
	Identity        RuntimeIdentity `json:"runtime_identity"`
	Policy          WorkerPolicy    `json:"worker_policy"`
	Profile         Profile         `json:"runtime_profile"`
	CloudServiceURL string          `json:"cloud_service_url,omitempty"` // empty: none given
}

// SameFixed reports whether both agree in what the first configuration fixes for the
// life of a Runtime: identity, policy and profile.
func (c RuntimeConfig) SameFixed(o RuntimeConfig) bool {
	return c.Identity == o.Identity && c.Policy == o.Policy && c.Profile == o.Profile
}

// MarshalJSON leaves the overrides out where they mean nothing: outside the shared
// profile.
func (c RuntimeConfig) MarshalJSON() ([]byte, error) {
	type plain RuntimeConfig
	if c.Profile != ProfileShared {
		c.Policy.Dedicated, c.Policy.Shared = WorkerOverrides{}, WorkerOverrides{}
	}
	return json.Marshal(plain(c))
}

// MarshalJSON leaves max_pending_registrations out, as LangBot does, and overrides that
// override nothing: the published SDK 0.5.5 refuses them.
func (p WorkerPolicy) MarshalJSON() ([]byte, error) {
	type plain WorkerPolicy
	out := struct {
		plain
		MaxPendingRegistrations *int             `json:"max_pending_registrations,omitempty"`
		Dedicated               *WorkerOverrides `json:"dedicated,omitempty"`
		Shared                  *WorkerOverrides `json:"shared,omitempty"`
	}{plain: plain(p)}
	if p.Dedicated != (WorkerOverrides{}) {
		out.Dedicated = &p.Dedicated
	}
	if p.Shared != (WorkerOverrides{}) {
		out.Shared = &p.Shared
	}
	return json.Marshal(out)
}

// DecodeRuntimeConfig reads the payload of set_runtime_config strictly: unknown members
// are refused, integers are no texts or truth values. Errors are Invalid, of the class
// ValidationError.
func DecodeRuntimeConfig(raw []byte) (RuntimeConfig, error) {
	s := readStrict(raw, "RuntimeConfig", "runtime_identity", "worker_policy", "runtime_profile", "cloud_service_url")
	c := RuntimeConfig{Profile: ProfileOSS}
	for _, name := range []string{"runtime_identity", "worker_policy"} {
		if !s.has(name) {
			s.bad(name, "the field is required")
		}
	}
	if s.has("runtime_profile") || s.fields["runtime_profile"] != nil {
		text, _ := jsonscan.Unquote(s.fields["runtime_profile"])
		if c.Profile = Profile(text); c.Profile != ProfileOSS && c.Profile != ProfileShared {
			s.bad("runtime_profile", "it must be oss_dev or shared")
		}
	}
	if s.has("cloud_service_url") {
		c.CloudServiceURL = strings.TrimRight(s.id("cloud_service_url", true), "/")
		if c.CloudServiceURL == "" {
			s.bad("cloud_service_url", "it must not be empty")
		}
	}
	if err := s.err(); err != nil {
		return RuntimeConfig{}, err
	}
	i := readStrict(s.fields["runtime_identity"], "RuntimeIdentity", "instance_uuid", "runtime_id")
	c.Identity = RuntimeIdentity{i.id("instance_uuid", true), i.id("runtime_id", true)}
	if err := i.err(); err != nil {
		return RuntimeConfig{}, err
	}
	var err error
	if c.Policy, err = decodePolicy(s.fields["worker_policy"]); err != nil {
		return RuntimeConfig{}, err
	}
	return c, nil
}

func decodePolicy(raw []byte) (WorkerPolicy, error) {
	s := readStrict(raw, "PluginWorkerPolicy", "max_cpus", "max_memory_mb", "max_pids", "max_open_files",
		"max_file_size_mb", "max_workers", "max_total_cpus", "max_total_memory_mb", "max_installations",
		"max_pending_registrations", "max_concurrent_restarts", "restart_failure_threshold",
		"restart_failure_window_seconds", "restart_circuit_open_seconds", "require_hard_limits",
		"dedicated", "shared")
	p := WorkerPolicy{
		MaxCPUs:                 s.real("max_cpus", 0),
		MaxMemoryMB:             s.count("max_memory_mb", 0),
		MaxPids:                 s.count("max_pids", 0),
		MaxOpenFiles:            s.count("max_open_files", 0),
		MaxFileSizeMB:           s.count("max_file_size_mb", 0),
		MaxWorkers:              s.count("max_workers", 16),
		MaxTotalCPUs:            s.real("max_total_cpus", 8),
		MaxTotalMemoryMB:        s.count("max_total_memory_mb", 8192),
		MaxInstallations:        s.count("max_installations", 10000),
		MaxPendingRegistrations: s.count("max_pending_registrations", 1024),
		MaxConcurrentRestarts:   s.count("max_concurrent_restarts", 1),
		RestartFailureThreshold: s.count("restart_failure_threshold", 8),
		RestartFailureWindow:    s.real("restart_failure_window_seconds", 30),
		RestartCircuitOpen:      s.real("restart_circuit_open_seconds", 60),
		RequireHardLimits:       s.truth("require_hard_limits", false),
	}
	for _, o := range []struct {
		name string
		to   *WorkerOverrides
	}{{"dedicated", &p.Dedicated}, {"shared", &p.Shared}} {
		if s.has(o.name) {
			var err error
			if *o.to, err = decodeOverrides(s.fields[o.name]); err != nil {
				return WorkerPolicy{}, err
			}
		}
	}
	if err := s.err(); err != nil {
		return WorkerPolicy{}, err
	}
	if p.MaxTotalCPUs < p.MaxCPUs {
		s.bad("max_total_cpus", "it must be at least max_cpus")
	}
	if p.MaxTotalMemoryMB < p.MaxMemoryMB {
		s.bad("max_total_memory_mb", "it must be at least max_memory_mb")
	}
	if p.MaxInstallations < p.MaxWorkers {
		s.bad("max_installations", "it must be at least max_workers")
	}
	if p.RestartFailureThreshold > p.MaxInstallations {
		s.bad("restart_failure_threshold", "it must be at most max_installations")
	}
	for _, w := range []struct {
		name string
		v    float64
	}{{"restart_failure_window_seconds", p.RestartFailureWindow}, {"restart_circuit_open_seconds", p.RestartCircuitOpen}} {
		if w.v > 3600 {
			s.bad(w.name, "it must be at most 3600")
		}
	}
	if err := s.err(); err != nil {
		return WorkerPolicy{}, err
	}
	return p, nil
}

func decodeOverrides(raw []byte) (o WorkerOverrides, err error) {
	s := readStrict(raw, "PluginWorkerResourceOverrides", "max_cpus", "max_memory_mb", "max_pids", "max_open_files", "max_file_size_mb")
	if s.has("max_cpus") {
		o.MaxCPUs = s.real("max_cpus", 0)
	}
	for _, f := range []struct {
		name string
		to   *int
	}{{"max_memory_mb", &o.MaxMemoryMB}, {"max_pids", &o.MaxPids}, {"max_open_files", &o.MaxOpenFiles}, {"max_file_size_mb", &o.MaxFileSizeMB}} {
		if s.has(f.name) {
			*f.to = s.count(f.name, 0)
		}
	}
	return o, s.err()
}
