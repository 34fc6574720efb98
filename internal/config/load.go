package config

import (
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/knadh/koanf/parsers/yaml"
	"github.com/knadh/koanf/providers/env/v2"
	"github.com/knadh/koanf/providers/file"
	"github.com/knadh/koanf/v2"
	"github.com/spf13/pflag"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// Setting is one leaf of Config with its three names.
type Setting struct {
	Key     string // as in the file: box.max_per_target
	Flag    string // --box-max-per-target
	Env     string // STOCKADE_BOX_MAX_PER_TARGET
	Doc     string
	Default any
}

// Settings lists every setting in the order of the struct.
func Settings() []Setting {
	var out []Setting
	def := Default()
	walk(reflect.ValueOf(&def).Elem(), "", func(key, doc string, v reflect.Value) {
		flag := strings.NewReplacer(".", "-", "_", "-").Replace(key)
		out = append(out, Setting{Key: key, Flag: flag, Doc: doc, Default: v.Interface(),
			Env: "STOCKADE_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))})
	})
	return out
}

func walk(v reflect.Value, prefix string, leaf func(key, doc string, v reflect.Value)) {
	for i := range v.NumField() {
		f := v.Type().Field(i)
		key := prefix + f.Tag.Get("koanf")
		if v.Field(i).Kind() == reflect.Struct {
			walk(v.Field(i), key+".", leaf)
			continue
		}
		leaf(key, f.Tag.Get("doc"), v.Field(i))
	}
}

// AddFlags defines one flag per setting, with the embedded defaults shown.
func AddFlags(fs *pflag.FlagSet) {
	for _, s := range Settings() {
		if s.Key == "version" {
			continue
		}
		switch d := s.Default.(type) {
		case string:
			fs.String(s.Flag, d, s.Doc)
		case int:
			fs.Int(s.Flag, d, s.Doc)
		case int64:
			fs.Int64(s.Flag, d, s.Doc)
		case time.Duration:
			fs.Duration(s.Flag, d, s.Doc)
		case bool:
			fs.Bool(s.Flag, d, s.Doc)
		case []string:
			fs.StringArray(s.Flag, d, s.Doc)
		default:
			panic(fmt.Sprintf("config: setting %s has the unsupported type %T", s.Key, d))
		}
	}
}

// Load puts the defaults, the file (if path is not empty), the environment and
// the flags that were set over one another and validates the result. An unknown
// key in the file is refused by name.
func Load(path string, fs *pflag.FlagSet) (Config, error) {
	k := koanf.New(".")
	known := map[string]Setting{}
	byEnv := map[string]string{}
	for _, s := range Settings() {
		known[s.Key] = s
		byEnv[s.Env] = s.Key
	}
	if path != "" {
		if err := k.Load(file.Provider(path), yaml.Parser()); err != nil {
			return Config{}, errdefs.Wrap(err, errdefs.Invalid, "the configuration file %s cannot be used: %v", path, err)
		}
		for _, key := range k.Keys() {
			if _, ok := known[key]; !ok {
				return Config{}, errdefs.New(errdefs.Invalid, "the configuration file %s has the unknown setting %q", path, key).
					WithNext("docs/configuration.md lists the settings")
			}
		}
	}
	fromEnv := env.Provider(".", env.Opt{Prefix: "STOCKADE_", EnvironFunc: os.Environ, TransformFunc: func(name, value string) (string, any) {
		key := byEnv[name] // others are the client's, such as STOCKADE_KEY
		if _, isList := known[key].Default.([]string); isList {
			return key, strings.Fields(value)
		}
		return key, value
	}})
	if err := k.Load(fromEnv, nil); err != nil {
		return Config{}, errdefs.Wrap(err, errdefs.Invalid, "the environment cannot be used: %v", err)
	}
	if fs != nil {
		for _, s := range Settings() {
			f := fs.Lookup(s.Flag)
			if f == nil || !f.Changed {
				continue
			}
			var v any = f.Value.String()
			if sv, ok := f.Value.(pflag.SliceValue); ok {
				v = sv.GetSlice()
			}
			if err := k.Set(s.Key, v); err != nil {
				return Config{}, errdefs.Wrap(err, errdefs.Invalid, "flag --%s cannot be used: %v", s.Flag, err)
			}
		}
	}
	c := Default()
	if err := k.Unmarshal("", &c); err != nil {
		// mapstructure puts a headline above its lines, which name the settings.
		_, lines, _ := strings.Cut(err.Error(), "\n\n")
		return Config{}, errdefs.Wrap(err, errdefs.Invalid, "a setting has the wrong type: %s", strings.ReplaceAll(strings.TrimSpace(lines), "\n", "; ")).
			WithNext("look for it in the flags, the environment and the file; docs/configuration.md says what each takes")
	}
	return c, c.Validate()
}

// Strays are the environment variables that begin like a setting and are none, such as
// STOCKADE_BOX_PDIS: they are told of and not refused, because others may set them
// (an orchestrator that names the address of a service "stockade-relay").
func Strays(environ []string) []string {
	sections, known := map[string]bool{}, map[string]bool{}
	for _, s := range Settings() {
		known[s.Env] = true
		if section, _, ok := strings.Cut(s.Key, "."); ok {
			sections["STOCKADE_"+strings.ToUpper(section)+"_"] = true
		}
	}
	var strays []string
	for _, v := range environ {
		name, _, _ := strings.Cut(v, "=")
		for prefix := range sections {
			if strings.HasPrefix(name, prefix) && !known[name] {
				strays = append(strays, name)
			}
		}
	}
	slices.Sort(strays)
	return strays
}

// Reference renders docs/configuration.md.
func Reference() string {
	var b strings.Builder
	b.WriteString("# Configuration of `stockade serve`\n\n" +
		"Every setting can be given as a flag, as an environment variable, or in a YAML file named with `--config`; a flag is stronger than the\n" +
		"environment, the environment stronger than the file. Lists repeat the flag; in the environment they are separated by spaces.\n" +
		"Durations are written like `90s`, `30m`, `24h`. An unknown key in the file is refused; an environment variable that only begins like a setting is named in the log.\n" +
		"This page is made from the code by `go test ./internal/config -update`.\n\n" +
		"| key in the file | flag | environment | default | what it does |\n|---|---|---|---|---|\n")
	for _, s := range Settings() {
		flag := "`--" + s.Flag + "`"
		if s.Key == "version" {
			flag = "–"
		}
		def := fmt.Sprintf("`%v`", s.Default)
		if v, ok := s.Default.([]string); ok && len(v) == 0 || s.Default == "" {
			def = "–"
		}
		if s.Key == "state_dir" {
			def = "`/var/lib/stockade`, or `~/.local/state/stockade` when not root"
		}
		doc := strings.ReplaceAll(s.Doc, "|", "\\|")
		fmt.Fprintf(&b, "| `%s` | %s | `%s` | %s | %s |\n", s.Key, flag, s.Env, def, doc)
	}
	return b.String()
}
