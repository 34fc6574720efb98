package pluginwire

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stockade-run/stockade/internal/need"
)

// python is the SDK's own models, to compare with.
type python struct {
	in  io.Writer
	out *bufio.Reader
}

type verdict struct {
	OK    bool            `json:"ok"`
	Dump  json.RawMessage `json:"dump"`
	Error string          `json:"error"`
}

func models(t *testing.T, series string) *python {
	cmd := exec.Command(need.SDK(t, series), "testdata/models.py")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		_ = cmd.Wait()
	})
	return &python{in, bufio.NewReader(out)}
}

func (p *python) ask(t interface{ Fatal(...any) }, model, text string) verdict {
	line, _ := json.Marshal(map[string]string{"model": model, "json": text})
	if _, err := p.in.Write(append(line, '\n')); err != nil {
		t.Fatal(err)
	}
	answer, err := p.out.ReadBytes('\n')
	if err != nil {
		t.Fatal(err)
	}
	var v verdict
	if err := json.Unmarshal(answer, &v); err != nil {
		t.Fatal(err)
	}
	return v
}

// ours says what we make of the same, and the value as the SDK dumps it.
func ours(model, text string) (any, error) {
	switch model {
	case "ActionEnvelopeContext":
		c, err := DecodeContext([]byte(text))
		return c, err
	case "RuntimeConfig":
		return DecodeRuntimeConfig([]byte(text))
	case "ReconcilePluginInstallationsRequest":
		list, err := DecodeReconcile([]byte(text))
		return map[string]any{"installations": list}, err
	case "ApplyPluginInstallationRequest":
		return DecodeApply([]byte(text))
	case "RemovePluginInstallationRequest":
		return struct{}{}, DecodeRemove([]byte(text))
	case "ActionRequest", "ActionResponse":
		var m Message
		if err := m.Decode([]byte(text)); err != nil {
			return nil, err
		}
		if model == "ActionResponse" {
			r := m.Response
			if m.Kind != KindResponse {
				return nil, fmt.Errorf("no response")
			}
			return map[string]any{"seq_id": r.ID, "message": r.Message, "data": r.Data, "chunk_status": r.Chunk}, nil
		}
		if m.Kind != KindRequest {
			return nil, fmt.Errorf("no request")
		}
		if m.Request.Problem != "" {
			return nil, fmt.Errorf("%s", m.Request.Problem)
		}
		c, err := DecodeContext(m.Request.Context)
		out := map[string]any{"seq_id": m.Request.ID, "action": m.Request.Action, "data": m.Request.Data}
		if !c.IsZero() {
			out["context"] = c
		}
		return out, err
	}
	panic(model)
}

// agree compares a dump with our value: every member of ours that is not null must be
// in the dump.
func agree(v any, dump json.RawMessage) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	var a, b any
	_ = json.Unmarshal(raw, &a)
	_ = json.Unmarshal(dump, &b)
	return contained(a, b, "")
}

func contained(a, b any, at string) error {
	am, ok := a.(map[string]any)
	if !ok {
		if al, ok := a.([]any); ok {
			bl, _ := b.([]any)
			if len(al) != len(bl) {
				return fmt.Errorf("%s: %d and %d entries", at, len(al), len(bl))
			}
			for i := range al {
				if err := contained(al[i], bl[i], fmt.Sprintf("%s[%d]", at, i)); err != nil {
					return err
				}
			}
			return nil
		}
		if !reflect.DeepEqual(a, b) {
			return fmt.Errorf("%s: we have %v, the SDK %v", at, a, b)
		}
		return nil
	}
	bm, _ := b.(map[string]any)
	for k, v := range am {
		if err := contained(v, bm[k], at+"."+k); err != nil {
			return err
		}
	}
	return nil
}

// values are what a member may be, sensible and not.
func values(sensible ...string) *rapid.Generator[string] {
	odd := []string{`null`, `true`, `false`, `0`, `-1`, `1`, `2`, `2.0`, `2.5`, `1e3`, `1e400`, `""`, `"  "`, `"2"`, `" 7 "`, `"2.0"`, `"x"`,
		`[]`, `{}`, `NaN`, `Infinity`, `-Infinity`, `99999999999999999999999`, `" a\u00a0"`, `"\ud83d\ude00"`}
	return rapid.Custom(func(t *rapid.T) string {
		if len(sensible) > 0 && rapid.IntRange(0, 3).Draw(t, "sensible") > 0 {
			return rapid.SampledFrom(sensible).Draw(t, "value")
		}
		return rapid.SampledFrom(odd).Draw(t, "odd")
	})
}

type fieldGen struct {
	name string
	rare bool // mostly absent
	gen  *rapid.Generator[string]
}

func objects(fields ...fieldGen) *rapid.Generator[string] {
	return rapid.Custom(func(t *rapid.T) string {
		var parts []string
		for _, f := range fields {
			odds := 12
			if f.rare {
				odds = 1
			}
			if rapid.IntRange(0, 12).Draw(t, f.name) < odds {
				parts = append(parts, `"`+f.name+`":`+f.gen.Draw(t, f.name))
			}
		}
		if rapid.IntRange(0, 20).Draw(t, "extra") == 0 {
			parts = append(parts, `"extra":1`)
		}
		return "{" + strings.Join(parts, ",") + "}"
	})
}

func contexts() *rapid.Generator[string] {
	digest := `"` + strings.Repeat("0a", 32) + `"`
	id := values(`"i-1"`, `" w "`, `"x"`)
	return rapid.OneOf(
		objects(fieldGen{"instance_uuid", false, id}, fieldGen{"workspace_uuid", false, id},
			fieldGen{"placement_generation", false, values("1", "2")}, fieldGen{"installation_uuid", false, id},
			fieldGen{"runtime_revision", false, values("1", "7")}, fieldGen{"artifact_digest", false, values(digest, digest, `"`+strings.Repeat("A", 64)+`"`)}),
		objects(fieldGen{"instance_uuid", false, id}, fieldGen{"workspace_uuid", false, id},
			fieldGen{"placement_generation", true, values("1", "2")}, fieldGen{"installation_uuid", true, id},
			fieldGen{"runtime_revision", true, values("1")}, fieldGen{"artifact_digest", true, values(digest)}),
	)
}

func configs() *rapid.Generator[string] {
	count, real := values("1", "4", "100"), values("1", "0.5", "2.5e0")
	shares := objects(fieldGen{"max_cpus", true, real}, fieldGen{"max_memory_mb", true, count}, fieldGen{"max_pids", true, count})
	policy := objects(fieldGen{"max_cpus", false, values("1", "0.5")}, fieldGen{"max_memory_mb", false, values("512")}, fieldGen{"max_pids", false, values("64")},
		fieldGen{"max_open_files", false, values("64")}, fieldGen{"max_file_size_mb", false, values("16")}, fieldGen{"max_workers", true, count},
		fieldGen{"max_total_cpus", true, real}, fieldGen{"max_total_memory_mb", true, values("512", "100")}, fieldGen{"max_installations", true, count},
		fieldGen{"max_pending_registrations", true, count}, fieldGen{"max_concurrent_restarts", true, count},
		fieldGen{"restart_failure_threshold", true, count}, fieldGen{"restart_failure_window_seconds", true, values("30", "3601")},
		fieldGen{"restart_circuit_open_seconds", true, values("60", "3600.0")}, fieldGen{"require_hard_limits", true, values("true", "false")},
		fieldGen{"dedicated", true, rapid.OneOf(shares, values())}, fieldGen{"shared", true, rapid.OneOf(shares, values())})
	identity := objects(fieldGen{"instance_uuid", false, values(`"i"`, `"i"`)}, fieldGen{"runtime_id", false, values(`"i:plugin-runtime"`)})
	return objects(fieldGen{"runtime_identity", false, identity}, fieldGen{"worker_policy", false, policy},
		fieldGen{"runtime_profile", true, values(`"oss_dev"`, `"shared"`)}, fieldGen{"cloud_service_url", true, values(`"https://x.example/ "`, `"/"`, `null`)})
}

func binding(n int) string {
	return fmt.Sprintf(`{"instance_uuid":"i","workspace_uuid":"w","placement_generation":1,"installation_uuid":"p%d","runtime_revision":1,"artifact_digest":"%s"}`,
		n, strings.Repeat("0a", 32))
}

func reconciles() *rapid.Generator[string] {
	entry := objects(fieldGen{"binding", false, rapid.OneOf(rapid.SampledFrom([]string{binding(1), binding(2), binding(3)}), contexts())},
		fieldGen{"enabled", true, values("true", "false")}, fieldGen{"execution_mode", true, values(`"dedicated"`, `"shared-runtime-v1"`)})
	return rapid.Custom(func(t *rapid.T) string {
		list := rapid.SliceOfN(entry, 0, 3).Draw(t, "entries")
		return `{"installations":[` + strings.Join(list, " , ") + `]}`
	})
}

func requests() *rapid.Generator[string] {
	return objects(fieldGen{"seq_id", false, values("1", "77")}, fieldGen{"action", false, values(`"list_tools"`, `"x"`)},
		fieldGen{"data", false, values(`{}`, `{"a":[1,null]}`)}, fieldGen{"context", true, rapid.OneOf(contexts(), values())},
		fieldGen{"stream_flow_control", true, rapid.SampledFrom([]string{"1", "null", "2", "0", `"1"`, "[]"})})
}

func responses() *rapid.Generator[string] {
	return objects(fieldGen{"seq_id", false, values("1", "77")}, fieldGen{"code", false, values("0", "1")}, fieldGen{"message", false, values(`"success"`, `"ok"`)},
		fieldGen{"data", false, values(`{}`, `{"a":[1,null]}`)}, fieldGen{"chunk_status", true, values(`"continue"`, `"end"`)},
		fieldGen{"stream_index", true, rapid.SampledFrom([]string{"1", "null", "3"})})
}

// TestModels compares our decoders with the SDK's models on the same texts.
func TestModels(t *testing.T) {
	t.Parallel()
	p := models(t, "0.7")
	for _, c := range []struct {
		model string
		gen   *rapid.Generator[string]
	}{
		{"ActionEnvelopeContext", contexts()},
		{"RuntimeConfig", configs()},
		{"ReconcilePluginInstallationsRequest", reconciles()},
		{"ApplyPluginInstallationRequest", objects(fieldGen{"artifact_file_key", true, values(`"ft1_x"`)}, fieldGen{"enabled", true, values("true", "false")},
			fieldGen{"execution_mode", true, values(`"dedicated"`, `"shared-runtime-v1"`)})},
		{"RemovePluginInstallationRequest", objects()},
		{"ActionRequest", requests()},
		{"ActionResponse", responses()},
	} {
		t.Run(c.model, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				text := c.gen.Draw(t, "json")
				theirs := p.ask(t, c.model, text)
				v, err := ours(c.model, text)
				if known, why := exception(c.model, text, v, theirs); known {
					t.Skip(why)
				}
				if (err == nil) != theirs.OK {
					t.Fatalf("%s\nwe: %v\nthe SDK: %v %s", text, err, theirs.OK, theirs.Error)
				}
				if err == nil {
					if err := agree(v, theirs.Dump); err != nil {
						t.Fatalf("%s\n%v", text, err)
					}
				}
			})
		})
	}
}

// exception lists where we differ knowingly.
func exception(model, text string, _ any, theirs verdict) (bool, string) {
	switch {
	case strings.Contains(text, "99999999999999999999999"):
		return true, "integers beyond 64 bits: Python has them, a peer never sends them"
	case model == "ActionResponse" && theirs.OK && strings.Contains(string(theirs.Dump), `"seq_id": null`):
		return true, "a response to nothing is ignored"
	}
	return false, ""
}

// TestEnumerations: every action that an SDK names has its place in the tables.
func TestEnumerations(t *testing.T) {
	t.Parallel()
	for _, series := range []string{"0.5", "0.6", "0.7"} {
		t.Run(series, func(t *testing.T) {
			t.Parallel()
			out, err := exec.Command(need.SDK(t, series), "testdata/enums.py").Output()
			if err != nil {
				t.Fatal(err)
			}
			var classes map[string][]string
			if err := json.Unmarshal(out, &classes); err != nil {
				t.Fatal(err)
			}
			for class, values := range classes {
				for _, a := range values {
					if strings.HasPrefix(a, "box_") {
						continue
					}
					if !slices.Contains(Actions(), a) {
						t.Errorf("%s %s is not known", class, a)
					}
					_, forwarded := ForwardOf(a)
					here := []string{ActionRegisterPlugin, ActionListCommands, ActionListTools, ActionListPluginsManifest}
					if class == "PluginToRuntimeAction" && forwarded == slices.Contains(here, a) {
						t.Errorf("%s: forwarded %v", a, forwarded)
					}
					if class == "LangBotToRuntimeAction" && ControlScope(a) == ScopeUnknown {
						t.Errorf("%s has no scope", a)
					}
				}
			}
		})
	}
}
