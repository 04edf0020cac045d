"""DeepSeek V3, R1 and V3.1: a section of calls between markers that are special tokens.

V3:   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather
      ```json
      {"city": "Paris"}
      ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
V3.1: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>
      <｜tool▁calls▁end｜>
"""

from scheduler.tools.section_calls import SectionCalls

_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
SEPARATOR = "<｜tool▁sep｜>"

DEEPSEEK_V3 = SectionCalls(
    _SECTION, _CALL, rf"[^<\n]*{SEPARATOR}\s*(?P<name>[^\s<`{{]+)\s*(?:```(?:json)?\s*)?(?=[{{<])"
)
DEEPSEEK_V31 = SectionCalls(_SECTION, _CALL, rf"\s*(?P<name>[^\s<]+)\s*{SEPARATOR}\s*(?=[{{<])")
