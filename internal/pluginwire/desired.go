package pluginwire

import (
	"encoding/json"

	"github.com/stockade-run/stockade/internal/jsonscan"
)

// Mode is how an installation is run.
type Mode string

// The modes. An absent one is ModeDedicated.
const (
	ModeDedicated Mode = "dedicated"
	ModeShared    Mode = "shared-runtime-v1"
)

// DesiredState is what one installation shall be.
type DesiredState struct {
	Binding Context `json:"binding"`
	Enabled bool    `json:"enabled"`
	Mode    Mode    `json:"execution_mode"`
}

// ApplyRequest is the payload of apply_plugin_installation.
type ApplyRequest struct {
	ArtifactFileKey string `json:"artifact_file_key,omitempty"` // empty: none, the cache must have it
	Enabled         bool   `json:"enabled"`
	Mode            Mode   `json:"execution_mode"`
}

// The states of an installation in a StateResult.
const (
	StateDisabled        = "disabled"
	StateStarting        = "starting"
	StateRunning         = "running"
	StateFailed          = "failed"
	StateArtifactMissing = "artifact_missing" // result only
	StateSuperseded      = "superseded"       // result only
	StateRemoved         = "removed"          // result only
)

// The error codes of a StateResult.
const (
	ErrorDependencyPrepare = "dependency_prepare_failed"
	ErrorWorkerLaunch      = "worker_launch_failed"
	ErrorSlotAttach        = "slot_attach_failed" // since 0.7
)

// StateResult answers apply and remove. Empty members are left out.
type StateResult struct {
	InstallationUUID            string `json:"installation_uuid"`
	State                       string `json:"state"`
	ArtifactPath                string `json:"artifact_path,omitempty"` // the code directory
	DependencyEnvironmentDigest string `json:"dependency_environment_digest,omitempty"`
	ErrorCode                   string `json:"error_code,omitempty"`
	Message                     string `json:"message,omitempty"`
}

// FailedInstallation is one entry of ReconcileResult.Failed.
type FailedInstallation struct {
	InstallationUUID string `json:"installation_uuid"`
	ErrorCode        string `json:"error_code"`
	Message          string `json:"message"`
}

// ReconcileResult answers reconcile_plugin_installations. Its lists are never null.
type ReconcileResult struct {
	Applied          []string             `json:"applied"`
	Removed          []string             `json:"removed"`
	MissingArtifacts []string             `json:"missing_artifacts"`
	Failed           []FailedInstallation `json:"failed_installations"`
}

// MarshalJSON writes empty lists for nil ones.
func (r ReconcileResult) MarshalJSON() ([]byte, error) {
	type plain ReconcileResult
	p := plain(r)
	for _, list := range []*[]string{&p.Applied, &p.Removed, &p.MissingArtifacts} {
		if *list == nil {
			*list = []string{}
		}
	}
	if p.Failed == nil {
		p.Failed = []FailedInstallation{}
	}
	return json.Marshal(p)
}

// DecodeReconcile reads the payload of reconcile_plugin_installations strictly; an
// installation that stands in it twice is refused. Errors are Invalid.
func DecodeReconcile(raw []byte) ([]DesiredState, error) {
	const model = "ReconcilePluginInstallationsRequest"
	s := readStrict(raw, model, "installations")
	list := s.fields["installations"]
	if len(s.problems) == 0 && (len(list) == 0 || list[0] != '[') {
		s.problems = append(s.problems, required("installations", "a list", list))
	}
	if err := s.err(); err != nil {
		return nil, err
	}
	var entries []json.RawMessage
	for a := (jsonscan.Scanner{B: list, I: 1, Python: true}); ; a.I++ {
		a.Space()
		if list[a.I] == ']' {
			break
		}
		from := a.I
		if !a.Value() {
			return nil, a.Err()
		}
		entries = append(entries, json.RawMessage(list[from:a.I]))
		if a.Space(); list[a.I] == ']' {
			break
		}
	}
	states := make([]DesiredState, 0, len(entries))
	seen := make(map[string]bool, len(entries))
	for _, entry := range entries {
		d, err := decodeDesired(entry)
		if err != nil {
			return nil, err
		}
		if seen[d.Binding.InstallationUUID] {
			s.bad("installations", "installation %s stands in the list twice", clip(d.Binding.InstallationUUID))
			return nil, s.err()
		}
		seen[d.Binding.InstallationUUID] = true
		states = append(states, d)
	}
	return states, nil
}

func decodeDesired(raw []byte) (DesiredState, error) {
	s := readStrict(raw, "PluginInstallationDesiredState", "binding", "enabled", "execution_mode")
	if !s.has("binding") && len(s.problems) == 0 {
		s.bad("binding", "the field is required")
	}
	d := DesiredState{Enabled: s.truth("enabled", true), Mode: s.mode()}
	if err := s.err(); err != nil {
		return DesiredState{}, err
	}
	var err error
	d.Binding, err = DecodeBinding(s.fields["binding"])
	return d, err
}

func (s *strict) mode() Mode {
	raw, there := s.fields["execution_mode"]
	if !there {
		return ModeDedicated
	}
	text, _ := jsonscan.Unquote(raw)
	m := Mode(text)
	if m != ModeDedicated && m != ModeShared {
		s.bad("execution_mode", "it must be %s or %s", ModeDedicated, ModeShared)
	}
	return m
}

// DecodeApply reads the payload of apply_plugin_installation strictly. Errors are
// Invalid.
func DecodeApply(raw []byte) (ApplyRequest, error) {
	s := readStrict(raw, "ApplyPluginInstallationRequest", "artifact_file_key", "enabled", "execution_mode")
	r := ApplyRequest{
		ArtifactFileKey: s.id("artifact_file_key", false),
		Enabled:         s.truth("enabled", true),
		Mode:            s.mode(),
	}
	if err := s.err(); err != nil {
		return ApplyRequest{}, err
	}
	return r, nil
}

// DecodeRemove checks the payload of remove_plugin_installation: an empty object.
// Errors are Invalid.
func DecodeRemove(raw []byte) error {
	return readStrict(raw, "RemovePluginInstallationRequest").err()
}
